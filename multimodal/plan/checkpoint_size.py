"""The size of a checkpoint, from a plan alone: bytes and files, and the bytes that a rank writes or (--async-save) copies."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from multimodal.cost.stage_layers import StageKey, StageLayers
from multimodal.cost.step_memory import OPTIMIZER_BYTES

_FILES_OF_RANK_0 = 2
"""braid.json and tensors.json; in addition, each rank with any tensors writes one file."""


class CheckpointSize(NamedTuple):
    """The size of a checkpoint without its two index files and the step counts of optimizers (4 bytes a tensor)."""

    num_bytes: int
    num_files: int
    most_written_bytes: int
    """Most bytes that a rank writes if all holders of the same write equal shares; tensors written whole come close to that."""
    most_copied_bytes: int
    """Most bytes that a rank copies if it saves in the background: its weights, and its share of optimizer state."""

    def describe(self) -> str:
        """Return one line."""
        return (
            f"a checkpoint has {self.num_bytes / 1e9:.4g} GB in {self.num_files} files; a rank writes at most "
            f"{self.most_written_bytes / 1e9:.3g} GB, with --async-save from a copy of {self.most_copied_bytes / 1e9:.3g} GB"
        )


def checkpoint_size(layers: StageLayers, *, bytes_per_element: int, zero_stage: int) -> CheckpointSize:
    """Return the size of a checkpoint of a run that has stepped. O(ranks x stages of a rank).

    bytes_per_element: of a weight; zero_stage: see `step_memory.ZERO_STAGES`.
    """
    size = _StageSizes(layers, bytes_per_element, zero_stage)
    written = [sum(map(size.written_bytes, stages)) for stages in layers.of_rank.values()]
    copied = [sum(map(size.copied_bytes, stages)) for stages in layers.of_rank.values()]
    return CheckpointSize(round(sum(written)), len(written) + _FILES_OF_RANK_0, round(max(written)), round(max(copied)))


@dataclass(frozen=True)
class _StageSizes:
    layers: StageLayers
    bytes_per_element: int
    zero_stage: int

    def written_bytes(self, stage: StageKey) -> float:
        """Return a rank's share of the bytes that all ranks of all replicas of a stage write."""
        return sum(self._whole_bytes(stage)) / (self._num_tensor_ranks(stage) * self._num_holders(stage))

    def copied_bytes(self, stage: StageKey) -> float:
        """Return the bytes that a rank of a stage copies before it saves in the background.

        Expert parallelism makes the held experts smaller, but not the shares of ZeRO: fewer ranks hold the same experts.
        """
        weights, optimizer = self._whole_bytes(stage)
        expert_weights, expert_optimizer = self._expert_bytes(stage)
        elsewhere = 1 - 1 / self.layers.plan.units[stage[0]].expert_parallel_size
        held_weights, held_optimizer = weights - elsewhere * expert_weights, optimizer - elsewhere * expert_optimizer
        shared = optimizer / self._num_holders(stage)
        copied = {
            0: held_weights + held_optimizer,
            1: held_weights + shared,
            2: held_weights + shared,
            3: weights / self._num_holders(stage) + shared,
        }
        return copied[self.zero_stage] / self._num_tensor_ranks(stage)

    def _expert_bytes(self, stage: StageKey) -> tuple[float, float]:
        """Return the bytes of all experts' weights and of their optimizer state; experts have no adapters."""
        held = trained = 0
        for kind, need in self.layers.in_order(stage):
            layer = self.layers.describe(stage[0], kind)
            held += layer.num_expert_weights
            trained += layer.num_expert_weights if need.trains_weights and not layer.adapted else 0
        return held * self.bytes_per_element, trained * self._optimizer_bytes

    def _whole_bytes(self, stage: StageKey) -> tuple[float, float]:
        """Return the bytes of weights and of optimizer state, all tensor parallel ranks together."""
        unit = stage[0]
        key = unit, *self.layers.plan.virtual_stage(*stage).layers
        if key not in self._known:
            held = trained = 0
            last = len(self.layers.graph.unit(unit).layers) - 1
            for index, (kind, need) in zip(key[1:], self.layers.in_order(stage), strict=True):
                layer = self.layers.describe(unit, kind)
                is_copy = index == last and self.layers.graph.unit(unit).ties_embeddings
                own = layer.num_parameters - (layer.num_weights if is_copy else 0)
                held += own
                trained += (layer.num_adapter_weights or own) if need.trains_weights else 0
            self._known[key] = held * self.bytes_per_element, trained * self._optimizer_bytes
        return self._known[key]

    @property
    def _optimizer_bytes(self) -> int:
        """Bytes of optimizer state per trained weight."""
        return OPTIMIZER_BYTES if self.bytes_per_element < 4 else 2 * self.bytes_per_element

    @cached_property
    def _known(self) -> dict[tuple[str | int, ...], tuple[float, float]]:
        return {}

    def _num_tensor_ranks(self, stage: StageKey) -> int:
        return self.layers.plan.units[stage[0]].tensor_parallel_size

    def _num_holders(self, stage: StageKey) -> int:
        """Return the number of ranks that hold the same weights."""
        sizes = self.layers.plan.units[stage[0]]
        return sizes.data_parallel_size * sizes.context_parallel_size
