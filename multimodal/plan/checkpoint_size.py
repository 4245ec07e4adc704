"""The size of a checkpoint, from a plan alone: bytes and files, and the bytes that a rank writes or (--async-save) copies."""

from typing import NamedTuple

from multimodal.cost.stage_layers import StageKey, StageLayers
from multimodal.cost.step_memory import optimizer_bytes

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

    bytes_per_element: of a weight; zero_stage: see `step_memory.ZERO_STAGES`. Expert parallelism makes the experts that a rank
    holds, and copies, smaller, but not the shares of ZeRO: fewer ranks hold the same experts.
    """
    state_bytes = optimizer_bytes(bytes_per_element)
    known: dict[tuple[str | int, ...], tuple[float, float]] = {}

    def written_and_copied(stage: StageKey) -> tuple[float, float]:
        """Return the bytes that a rank of a stage writes and, before it saves in the background, copies."""
        unit, sizes = stage[0], layers.plan.units[stage[0]]
        key = unit, *layers.plan.virtual_stage(*stage).layers
        if key not in known:
            weights, trained, experts, trained_experts = _count_weights(layers, stage)
            tensor_ranks, holders = sizes.tensor_parallel_size, sizes.data_parallel_size * sizes.context_parallel_size
            whole, optimizer = weights * bytes_per_element, trained * state_bytes
            elsewhere = 1 - 1 / sizes.expert_parallel_size
            held = whole - elsewhere * experts * bytes_per_element if zero_stage < 3 else whole / holders
            state = optimizer - elsewhere * trained_experts * state_bytes if zero_stage == 0 else optimizer / holders
            known[key] = (whole + optimizer) / (tensor_ranks * holders), (held + state) / tensor_ranks
        return known[key]

    of_ranks = [[written_and_copied(stage) for stage in stages] for stages in layers.of_rank.values()]
    written, copied = ([sum(stage[which] for stage in stages) for stages in of_ranks] for which in (0, 1))
    return CheckpointSize(round(sum(written)), len(written) + _FILES_OF_RANK_0, round(max(written)), round(max(copied)))


def _count_weights(layers: StageLayers, stage: StageKey) -> tuple[int, int, int, int]:
    """Return a stage's weights, and the trained ones of these, then those of its experts, which have no adapters."""
    unit, indices = stage[0], layers.plan.virtual_stage(*stage).layers
    last = len(layers.graph.unit(unit).layers) - 1
    held = trained = experts = trained_experts = 0
    for index, (kind, need) in zip(indices, layers.in_order(stage), strict=True):
        layer = layers.describe(unit, kind)
        is_copy = index == last and layers.graph.unit(unit).ties_embeddings
        own = layer.num_parameters - (layer.num_weights if is_copy else 0)
        held += own
        experts += layer.num_expert_weights
        if need.trains_weights:
            trained += layer.num_adapter_weights or own
            trained_experts += 0 if layer.adapted else layer.num_expert_weights
    return held, trained, experts, trained_experts
