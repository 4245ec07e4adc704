"""Bytes of a step on each rank (weights and optimizer state always, activations until their backward), and of a checkpoint."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.layers.collectives import LAYERS_AHEAD, held_key_bytes
from multimodal.cost.layers.layer import ActivationCase, Implementation, Recompute
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.memoize import memoized
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.token_shares import RankLoad
from multimodal.cost.unit_load import UnitLoad, add_loads
from multimodal.values.action import Place
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import Role
from multimodal.values.parts.cuts import StageKey

BYTES_PER_ELEMENT = 2
"""bf16 activations and weights."""
GRADIENT_BYTES = 4
"""Megatron accumulates gradients in fp32."""
OPTIMIZER_BYTES = 12
"""Adam in fp32: master weight and two moments."""
ZERO_STAGES = (0, 1, 2, 3)
"""Shared by replicas instead of kept by each: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
OPEN_GRADIENTS = 2.5
"""Messages in memory at the peak, at the end of a forward, as measured in real steps: its result until it is sent, and gradients
whose receives are posted, one more in some schedules than in others. The next activations are mostly received later."""


def default_zero_stage(bytes_per_element: int) -> int:
    """Return the ZeRO stage of training: 1, but 0 in fp64, whose optimizer stays whole on every replica."""
    return 0 if bytes_per_element > 4 else 1


def layer_static_bytes(
    num_weights: float,
    *,
    is_trained: bool,
    data_parallel_size: int,
    zero_stage: int = 1,
    bytes_per_element: int = BYTES_PER_ELEMENT,
) -> float:
    """Return the bytes of `num_weights` weights on one replica, all tensor parallel ranks together.

    zero_stage: see ZERO_STAGES; data_parallel_size: number of ranks that hold the same weights, including context parallel ones.
    fp32 weights are their own master weights; in fp64, gradients and moments are fp64, too.
    """
    weights = num_weights * bytes_per_element / (data_parallel_size if zero_stage >= 3 else 1)
    if not is_trained:
        return weights
    optimizer = optimizer_bytes(bytes_per_element)
    gradients = max(GRADIENT_BYTES, bytes_per_element) / (data_parallel_size if zero_stage >= 2 else 1)
    return weights + num_weights * (gradients + optimizer / (data_parallel_size if zero_stage >= 1 else 1))


def optimizer_bytes(bytes_per_element: int) -> int:
    """Return the bytes of optimizer state per weight: two moments, and an fp32 copy of narrower weights."""
    return OPTIMIZER_BYTES if bytes_per_element < 4 else 2 * bytes_per_element


@dataclass(frozen=True)
class StepMemory:
    """Bytes per rank. The schedule determines how many microbatches are kept at a time and for how long, deferral included."""

    layers: StageLayers
    loads: AssignedLoads
    options: RunOptions
    bytes_per_element: int
    """Size of a weight and of an activation."""

    def activation_bytes(self, place: Place) -> int:
        """Return the bytes that one microbatch keeps in a stage: for its layers, and received inputs that need a gradient."""
        number = self.loads.assignment.placed[place.unit].microbatch_starts[place.replica] + place.microbatch
        return int(self.kept_bytes(place.unit)[place.stage, number])

    @memoized
    def kept_bytes(self, unit: str) -> Integers:
        """Return `activation_bytes` of every stage and microbatch of a unit, [num_stages, num_microbatches]."""
        placed, kept = self.loads.assignment.placed[unit], self.loads.kept(unit)
        plan, of_layers = self.layers.plan.units[unit], dict[object, Floats]()
        found = np.zeros((plan.num_virtual_stages, placed.num_microbatches))
        for stage, replica in np.ndindex(len(found), plan.data_parallel_size if plan.is_unlike else 1):
            if stage >= plan.num_stages_of(replica):
                continue
            key, own = (unit, replica, stage), slice(None)
            if plan.is_unlike:
                own = slice(*placed.microbatch_starts[replica : replica + 2])
            counts = self.layers.counts(key)
            like = tuple(counts.items()), self.layers.tensor_size(key), stage == 0, self._width_before(key)
            if like not in of_layers:
                layers = sum(count * self._rank_bytes(key, *each, kept, self.options.recompute) for each, count in counts.items())
                received = self._received_bytes(key, add_loads(kept))
                of_layers[like] = layers + received + np.zeros(np.shape(kept.whole.num_tokens))
            found[stage, own] = of_layers[like][own]
        return np.round(found).astype(np.int64)

    def cut_bytes(self, unit: str) -> Integers:
        """Return the bytes that ranges of segments add to `kept_bytes` in a stage, [num_stages, num_microbatches].

        A layer then keeps the results of its two sums over tensor parallel ranks and, if weights are trained, the gathered rows
        that a whole layer would gather again. With full recomputation the bytes are the same as without ranges.
        """
        plan, hidden_size = self.layers.plan.units[unit], self.layers.graph.unit(unit).transformer.hidden_size
        num_rows = add_loads(self.loads.kept(unit)).num_tokens / plan.context_parallel_size
        replicas = self.loads.assignment.placed[unit].replica_of_microbatch
        per_replica = np.zeros((plan.num_virtual_stages, plan.data_parallel_size))
        for replica in range(plan.data_parallel_size if plan.is_unlike else 1):
            for stage in range(plan.num_stages_of(replica)):
                counts = self.layers.counts((unit, replica, stage))  # rows that a stage keeps per token
                size = self.layers.tensor_size((unit, replica, stage)) if self.options.sequence_parallel else 1
                cut = [each for each in counts if len(LAYER_KINDS[each[0]].segments) > 1 and each[1].has_backward]
                cut = [each for each in cut if not (self.options.recompute == "full" and LAYER_KINDS[each[0]].recomputes)]
                per_token = sum(counts[each] * (1 / size + each[1].trains_weights * (1 - 1 / size)) for each in cut)
                per_replica[stage, replica if plan.is_unlike else slice(None)] = per_token
        kept = per_replica[:, replicas] * np.atleast_1d(num_rows) * (2 * hidden_size * self.bytes_per_element)
        return np.round(kept).astype(np.int64)

    def _width_before(self, stage: StageKey) -> int:
        """Return the input channels of a stage; for a unit's first stage, those of the rows that take the places of items."""
        first = self.layers.plan.virtual_stage(*stage).layers.start
        if first == 0 and self.layers.graph.unit(stage[0]).role is Role.GENERATOR:
            return self.layers.graph.backbone.transformer.hidden_size
        return self.layers.graph.width_behind(stage[0], max(0, first - 1))

    def static_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's weights, gradients and optimizer state, of the work on one layer, and of messages."""
        held = self.layers.of_rank[rank]
        kept = sum(self.weight_bytes(stage) + self.unreduced_bytes(stage) for stage in held)
        return round(kept + max(map(self._working_bytes, held)) + self.broker_bytes(rank))

    def broker_bytes(self, rank: int) -> int:
        """Return the bytes of messages that are received (or awaited) and not used yet, or computed and not sent yet."""
        found = []
        for unit, replica, index in self.layers.of_rank[rank]:
            mean, is_unlike = self.loads.means(unit)[replica], self.layers.plan.units[unit].is_unlike
            per_token, per_output = self._message_sizes((unit, replica if is_unlike else 0, index))
            found.append(mean.num_tokens * per_token + mean.num_outputs * per_output)
        return round(max(found))

    def gathered_bytes(self, stage: StageKey) -> float:
        """Return the bytes of a stage's weights and gradients beyond a rank's own part; 0 if replicas do not share weights.

        The peak is at the end of a layer's backward: its weights and the next ones, its gradients, and those of the layer after
        it on their way to the ranks that keep them, or those of all layers until they are reduced once.
        """
        unit, _, index = stage
        if not self._shares_weights(stage):
            return 0.0
        return self._gathered_bytes(stage if self.layers.plan.units[unit].is_unlike else (unit, 0, index))

    @memoized
    def _gathered_bytes(self, stage: StageKey) -> float:
        layers = [(self.layers.describe(stage[0], layer), need) for layer, need in self.layers.in_order(stage)]
        weights = [layer.num_held_weights for layer, _ in layers]
        gradients = [layer.num_trained_weights(need) for layer, need in layers]
        bytes_per_gradient = max(GRADIENT_BYTES, self.bytes_per_element)
        peak = max(
            self.bytes_per_element * (sum(weights[max(0, index - LAYERS_AHEAD) : index + 1]) + gradient)
            + (0 if self.options.reduces_once else bytes_per_gradient * gone)
            for index, (gradient, gone) in enumerate(zip(gradients, [*gradients[1:], 0], strict=True))
        )
        return peak / self.layers.tensor_size(stage)

    def unreduced_bytes(self, stage: StageKey) -> float:
        """Return the bytes of a stage's gradients that a rank adds up until they are reduced once."""
        if not (self.options.reduces_once and self._shares_weights(stage)):
            return 0.0
        num_weights = self.layers.num_weights(stage, trained_only=True)
        return max(GRADIENT_BYTES, self.bytes_per_element) * num_weights / self.layers.tensor_size(stage)

    def _shares_weights(self, stage: StageKey) -> bool:
        sizes = self.layers.plan.units[stage[0]]
        return self.options.zero_stage >= 3 and sizes.data_parallel_size * sizes.context_parallel_size > 1

    def _rank_bytes(self, stage: StageKey, layer: str, need: BackwardNeed, kept: RankLoad, recompute: Recompute | None) -> float:
        """Return the bytes that a layer keeps for a load; for a load whose numbers are arrays, as an array."""
        described, tensor_size, total = self.layers.describe(stage[0], layer), self.layers.tensor_size(stage), 0.0
        for load, is_spread in ((kept.whole, False), (kept.cut, True)):
            case = ActivationCase(need, self.bytes_per_element, self._implementation(stage[0]), recompute, is_spread)
            total = total + described.activation_bytes(load, case).all_ranks(
                tensor_parallel_size=tensor_size, sequence_parallel=self.options.sequence_parallel
            )
        return total / (tensor_size * self.layers.plan.units[stage[0]].context_parallel_size)

    def _implementation(self, unit: str) -> Implementation:
        return "local" if self.layers.graph.unit(unit).needs_local_layers else self.options.transformer_impl

    def _received_bytes(self, stage: StageKey, load: UnitLoad) -> float | Floats:
        """Return the bytes of received hidden states or encoder outputs for which a gradient is sent back."""
        unit, _, index = stage
        if not any(need.sends_gradient for _, need in self.layers.counts(stage)):
            return 0.0
        sizes, num_channels = self.layers.plan.units[unit], self._width_before(stage)
        if index == 0:
            return self.bytes_per_element * num_channels * self.loads.num_received_rows(unit) / sizes.context_parallel_size
        if self.bytes_per_element >= 4 or self._implementation(unit) == "transformer_engine":
            num_channels -= self.layers.graph.unit(unit).transformer.hidden_size  # the first norm keeps the same tensor
        num_ranks = sizes.context_parallel_size * (self.layers.tensor_size(stage) if self.options.sequence_parallel else 1)
        return self.bytes_per_element * num_channels * load.num_tokens / num_ranks

    @memoized
    def _message_sizes(self, stage: StageKey) -> tuple[float, float]:
        """Return the bytes of messages that are open for each of a microbatch's tokens, and for each that leaves its unit."""
        unit, replica, index = stage
        sizes = self.layers.plan.units[unit]
        num_ranks = sizes.context_parallel_size * (self.layers.tensor_size(stage) if self.options.sequence_parallel else 1)
        is_last = index == sizes.num_stages_of(replica) - 1
        width = self.layers.graph.width_behind(unit, self.layers.plan.virtual_stage(*stage).layers.stop - 1)
        if not is_last:
            return self.bytes_per_element * OPEN_GRADIENTS * width / num_ranks, 0.0
        targets = self.layers.graph.downstream(unit) if self.layers.graph.unit(unit).role is Role.ENCODER else ()
        return 0.0, self.bytes_per_element * OPEN_GRADIENTS * width * len(targets) / sizes.context_parallel_size

    def weight_bytes(self, stage: StageKey) -> float:
        """Return the bytes of a stage's weights, gradients and optimizer state, per rank."""
        unit, _, index = stage
        are_alike = self.options.num_state_copies is None and not self.layers.plan.units[unit].is_unlike
        return self._weight_bytes((unit, 0, index) if are_alike else stage)

    @memoized
    def _weight_bytes(self, stage: StageKey) -> float:
        sizes = self.layers.plan.units[stage[0]]
        num_copies = self.options.num_state_copies if self.options.zero_stage >= 3 else None
        copies = sizes.data_parallel_size * sizes.context_parallel_size // min(num_copies or 1, sizes.data_parallel_size)
        trained, held = (self.layers.weights_by_sharers(stage, trained_only=only) for only in (True, False))
        frozen = [
            (num_held - num_trained, False, copies // num_sharers)
            for (num_trained, num_sharers), (num_held, _) in zip(trained, held, strict=True)
        ]
        shares = self.layers.state_shares(stage, num_copies=self.options.num_state_copies)
        total = sum(
            layer_static_bytes(
                num_weights,
                is_trained=is_trained,
                data_parallel_size=num_sharers,
                zero_stage=self.options.zero_stage,
                bytes_per_element=self.bytes_per_element,
            )
            for num_weights, is_trained, num_sharers in (*((weights, True, len(ranks)) for ranks, weights in shares), *frozen)
        )
        return total / self.layers.tensor_size(stage)

    def _working_bytes(self, stage: StageKey) -> float:
        """Return the bytes in use while one layer runs: recomputed activations and gathered tensors.

        If replicas share weights, gathered tensors are the weights of the current layer and of the next ones, the gradients of
        one layer, and those of another one on their way to their keeper. Context parallel ranks also gather the keys and values
        of two steps' heads (the current and the next step) for all tokens that they share.
        """
        unit, replica, index = stage
        sizes, working = self.layers.plan.units[unit], self.gathered_bytes(stage)
        if self.options.recompute == "full":
            like = stage if sizes.is_unlike else (unit, 0, index)
            working += self._repeated_bytes(like, self.loads.fullest(unit)[replica])
        if sizes.context_parallel_size > 1:
            shape = self.layers.graph.unit(unit).transformer
            bytes_per_group = 2 * shape.head_channels * self.loads.num_gathered(unit, replica) * self.bytes_per_element
            working += held_key_bytes(shape.query_groups // self.layers.tensor_size(stage), bytes_per_group=bytes_per_group)
        return working

    @memoized
    def _repeated_bytes(self, stage: StageKey, kept: RankLoad) -> float:
        """Return the most bytes that one of a stage's layers keeps while it is computed again for a load."""
        repeated = [(layer, need) for layer, need in self.layers.counts(stage) if LAYER_KINDS[layer].recomputes]
        return max((self._rank_bytes(stage, layer, need, kept, None) for layer, need in repeated), default=0.0)


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
            weights = trained = experts = trained_experts = 0  # experts have no adapters
            last = len(layers.graph.unit(unit).layers) - 1
            for index, (kind, need) in zip(layers.plan.virtual_stage(*stage).layers, layers.in_order(stage), strict=True):
                layer = layers.describe(unit, kind)
                is_copy = index == last and layers.graph.unit(unit).ties_embeddings
                own = layer.num_parameters - (layer.num_weights if is_copy else 0)
                weights += own
                experts += layer.num_expert_weights
                if need.trains_weights:
                    trained += layer.num_adapter_weights or own
                    trained_experts += 0 if layer.adapted else layer.num_expert_weights
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
