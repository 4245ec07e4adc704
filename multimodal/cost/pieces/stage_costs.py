"""Costs of stages that depend on no sample: seconds of computations by load, of the replicas' collectives, and of the update."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from multimodal.cost.cluster import collective_seconds
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.memoize import memoized
from multimodal.cost.pieces.tensor_parallel_waits import LayerNeed, Wait, computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_costs import LayerCosts, LayerSeconds, Sharing
from multimodal.cost.seconds.layer_profile import StepProfile
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import GRADIENT_BYTES, optimizer_bytes
from multimodal.cost.unit_load import ComputedLoad
from multimodal.values.action import BACKWARDS, Action, ActionKind, LayerRange
from multimodal.values.arrays.rows import Bools, Floats
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.parts.cuts import StageKey

COMPUTATIONS = (ActionKind.FORWARD, *BACKWARDS)
"""Kinds of computations, in the order of `StageCosts.computations`."""


@dataclass(frozen=True)
class StageCosts:
    """Seconds of stages on a cluster."""

    layer_costs: LayerCosts
    stages: StageLayers
    options: RunOptions

    @property
    def step_profile(self) -> StepProfile | None:
        """Measured seconds outside of layers, if there are any."""
        return self.layer_costs.profile.step if self.layer_costs.profile is not None else None

    @memoized
    def alike(self, unit: str) -> Sequence[tuple[StageKey, Bools]]:
        """Return stages grouped by layers and links: one stage of each group, and its members, [num_stages, num_replicas]."""
        plan, found = self.stages.plan.units[unit], dict[object, tuple[StageKey, Bools]]()
        shape, known = (plan.num_virtual_stages, plan.data_parallel_size), dict[object, object]()
        for replica, each in enumerate(plan.replicas):
            for virtual in each.virtual_stages:
                key = unit, replica, virtual.index
                looks = virtual.layers, self._on_first_nodes(virtual.ranks), self._on_first_nodes(self._expert_ranks(key))
                like = known[looks] if looks in known else known.setdefault(looks, self._like(key))
                index = (like, virtual.index) if self.options.zero_stage >= 3 else like
                found.setdefault(index, (key, np.zeros(shape, bool)))[1][virtual.index, replica] = True
        return list(found.values())

    def _like(self, key: StageKey) -> object:
        """Return a value that is the same for stages that take the same seconds for the same load."""
        unit, counts = key[0], self.stages.counts(key)
        if len(self.stages.plan.virtual_stage(*key).ranks) == 1 == self.stages.plan.units[unit].expert_parallel_size:
            return tuple(counts.items())
        sharing = self._sharing(key)
        return tuple(counts.items()), tuple(self.layer_costs.collectives(unit, layer, sharing) for layer, _ in counts)

    def _on_first_nodes(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks moved to the first nodes: the node of the first rank becomes node 0."""
        cluster = self.layer_costs.cluster
        first = cluster.node(min(ranks)) * cluster.gpus_per_node
        return tuple(rank - first for rank in ranks)

    def computations(self, stage: StageKey, load: ComputedLoad) -> Floats:
        """Return the seconds of `COMPUTATIONS` for a load, and the waits among them, [2, kinds]; for arrays [2, kinds, size]."""
        sharing, measured, found = self._sharing(stage), self.step_profile, [(0.0, 0.0)] * len(COMPUTATIONS)
        for (layer, need), count in self.stages.counts(stage).items():
            one = self.layer_costs.seconds(stage[0], layer, load.all, sharing, cut=load.cut)
            costs = [_cost_of(kind, one, layer, need) for kind in COMPUTATIONS]
            found = [(a + count * c, b + count * d) for (a, b), (c, d) in zip(found, costs, strict=True)]
        is_busy = load.all.num_tokens > 0  # or arrays of them
        rows = np.zeros((2, len(COMPUTATIONS), *np.shape(is_busy)))
        for row, (kind, (seconds, waiting)) in enumerate(zip(COMPUTATIONS, found, strict=True)):
            if measured is not None and kind is not ActionKind.WEIGHT_GRADIENT:
                seconds = seconds + is_busy * measured.computation_seconds
            late = self.gathering_seconds(kind, stage, reduces=not self.options.reduces_once) - seconds
            late = is_busy * (late > 0) * late
            rows[:, row] = seconds + late, waiting + late
        return rows

    def expert_products(self, stage: StageKey, load: ComputedLoad) -> Floats:
        """Return the seconds of the experts' products in `COMPUTATIONS`, [1, kinds]; for arrays [1, kinds, size]."""
        found = np.zeros((1, len(COMPUTATIONS), *np.shape(load.all.num_tokens)))
        for (layer, need), count in self.stages.counts(stage).items():
            if LAYER_KINDS[layer].exchanges_tokens:
                one = count * np.asarray(self.layer_costs.expert_products(stage[0], layer, load.all, self._sharing(stage)))
                passes = LAYER_KINDS[layer].passes_gradient(need) * (2 if self.options.recompute == "full" else 1)
                trains = need.trains_weights and not self.stages.describe(stage[0], layer).adapted
                for row, kind in enumerate(COMPUTATIONS):
                    of_weights = trains * (kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT))
                    of_inputs = passes * (kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT))
                    found[0, row] += one if kind is ActionKind.FORWARD else (of_weights + of_inputs) * one
        return found

    def segments(self, stage: StageKey, load: ComputedLoad) -> Floats:
        """Return the seconds of `COMPUTATIONS` in each segment, and the waits among them: [2, kinds, num_segments, ...].

        The part of `computations` beyond the layers' seconds is left out. A layer whose forward is recomputed is recomputed in
        the segment behind it, or in its last segment at the stage's end.
        """
        layers, blocks, repeated = self.stages.in_order(stage), dict[LayerNeed, Floats](), dict[LayerNeed, float]()
        for layer, need in self.stages.counts(stage):
            own, again = self.layer_costs.segments(stage[0], layer, load.all, self._sharing(stage), cut=load.cut)
            block = np.zeros((2, len(COMPUTATIONS), len(own), *np.shape(load.all.num_tokens)))
            for row, kind in enumerate(COMPUTATIONS):
                for place, seconds in enumerate(own):
                    block[0, row, place], block[1, row, place] = _cost_of(kind, seconds, layer, need)
            blocks[layer, need], repeated[layer, need] = block, LAYER_KINDS[layer].passes_gradient(need) * again
        found = np.concatenate([blocks[each] for each in layers], axis=2)
        behind = np.minimum(np.cumsum([blocks[each].shape[2] for each in layers]), found.shape[2] - 1)
        for row, kind in enumerate(COMPUTATIONS):
            if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
                for place, each in zip(behind.tolist(), layers, strict=True):
                    found[0, row, place] += repeated[each]
            for wait, waiting in self._timed_waits(kind, stage, load):
                found[:, row, wait.segment] += waiting
        return found

    def waits(self, stage: StageKey, kind: ActionKind, load: ComputedLoad) -> list[float]:
        """Return the seconds of a whole computation's waits for tensor parallel ranks, in order; arrays for a load of arrays."""
        if self.options.hides_waits_of(self.stages.graph.unit(stage[0])) or self.stages.tensor_size(stage) == 1:
            return []
        return [seconds for _, seconds in self._timed_waits(kind, stage, load)]

    def _timed_waits(self, kind: ActionKind, stage: StageKey, load: ComputedLoad) -> Iterator[tuple[Wait, float]]:
        """Yield the waits of a whole computation with their seconds: a layer's waiting is shared evenly by its long waits."""
        layers, of_layer, unit = self.stages.in_order(stage), dict[LayerNeed, float](), self.stages.graph.unit(stage[0])
        for each in dict.fromkeys(layers):
            num_long = sum(wait.is_long for wait in computation_waits(kind, (each,), options=self.options, unit=unit))
            if num_long:
                waiting = self.layer_costs.tensor_waits(stage[0], each[0], load.all, self._sharing(stage))
                of_layer[each] = waiting[kind is not ActionKind.FORWARD] / num_long
        for wait in computation_waits(kind, layers, options=self.options, unit=unit):
            yield wait, of_layer[layers[wait.layer]] * wait.is_long

    def over_replicas(self, stage: StageKey, bytes_per_weight: float, *, trained_only: bool) -> float:
        """Seconds of one ring over all ranks that have the same shard of a stage's weights."""
        unit, size, total = stage[0], self.stages.tensor_size(stage), 0.0
        for num_weights, num_sharers in self.stages.weights_by_sharers(stage, trained_only=trained_only):
            total += self._ring_seconds(unit, stage[2], size, num_sharers, bytes_per_weight * num_weights / size)
        return total

    @memoized
    def _ring_seconds(self, unit: str, stage: int, tensor_size: int, num_sharers: int, num_bytes: float) -> float:
        replicas = self.stages.plan.units[unit].replicas[::num_sharers]
        if self.options.zero_stage >= 3 and self.options.num_state_copies is not None:  # over those of one copy
            replicas = replicas[: max(1, len(replicas) // self.options.num_state_copies)]
        peers = [rank for replica in replicas for rank in replica.virtual_stages[stage].ranks[::tensor_size]]
        return collective_seconds(num_bytes, ranks=peers, cluster=self.layer_costs.cluster)

    def over_unlike(self, reduction: Action) -> float:
        """Seconds of a ring over the holders of some layers, of a unit with unlike replicas: those of the largest share."""
        unit, stage = self.stages.plan.units[reduction.unit], self.stages.plan.virtual_stage(*reduction[1:4])
        assert isinstance(reduction.covers, LayerRange)
        layers = stage.layers[reduction.covers.first : reduction.covers.end]
        holders = [each for replica in unit.replicas for each in replica.virtual_stages if layers.start in each.layers]
        size = min(map(unit.tensor_size, holders))
        needs = self.stages.in_order(reduction[1:4])[reduction.covers.first : reduction.covers.end]
        num_weights = sum(self.stages.describe(reduction.unit, layer).num_trained_weights(need) for layer, need in needs)
        peers = [group[0] for each in holders for group in unit.tensor_parallel_groups(each)]
        return collective_seconds(GRADIENT_BYTES * num_weights / size, ranks=peers, cluster=self.layer_costs.cluster)

    def over_sharers(self, stage: StageKey) -> float:
        """Seconds of gathering a stage's updated weights among the ranks that share a copy of their optimizer state."""
        cluster = self.layer_costs.cluster
        num_bytes = cluster.bytes_per_element / self.stages.tensor_size(stage)
        shares = self.stages.state_shares(stage, num_copies=self.options.num_state_copies)
        return sum(collective_seconds(num_bytes * weights, ranks=ranks, cluster=cluster) for ranks, weights in shares if weights)

    def _sharing(self, stage: StageKey) -> Sharing:
        """Return how the ranks of a stage share a layer; ranks as if on the first nodes."""
        sizes = self.stages.tensor_size(stage), self.stages.plan.units[stage[0]].context_parallel_size
        ranks = self.stages.plan.virtual_stage(*stage).ranks, self._expert_ranks(stage)
        return Sharing(*sizes, self.options.recompute, *map(self._on_first_nodes, ranks))

    def _expert_ranks(self, stage: StageKey) -> Sequence[int]:
        """Return the ranks that share experts with the stage's first rank; only that rank if experts are not shared."""
        unit, replica, index = self.stages.plan.units[stage[0]], *stage[1:]
        if unit.expert_parallel_size == 1:
            return self.stages.plan.virtual_stage(*stage).ranks[:1]
        first = replica - replica % unit.expert_parallel_size
        return [each.virtual_stages[index].ranks[0] for each in unit.replicas[first : first + unit.expert_parallel_size]]

    def gathering_seconds(self, kind: ActionKind, stage: StageKey, *, reduces: bool) -> float:
        """Return the seconds of gathering a stage's weights and scattering gradients while it computes; 0 without ZeRO-3."""
        if self.options.zero_stage < 3:
            return 0.0
        seconds = self.over_replicas(stage, GRADIENT_BYTES, trained_only=True) if reduces and kind in BACKWARDS else 0.0
        if kind is not ActionKind.WEIGHT_GRADIENT:
            seconds += self.over_replicas(stage, self.layer_costs.cluster.bytes_per_element, trained_only=False)
        return seconds

    def update_seconds(self) -> float:
        """Return the slowest rank's seconds, as a profile has them, or the optimizer's bytes over the memory bandwidth, or 0."""
        # Replicas that are alike need one rank of each kind only.
        stages, units, cluster = self.stages, self.stages.plan.units, self.layer_costs.cluster
        held = {
            tuple((unit, replica if units[unit].is_unlike else 0, stage) for unit, replica, stage in keys)
            for keys in stages.of_rank.values()
        }
        shares = list[dict[str, float]]()  # by unit, the trained weights that a rank updates
        for keys in held:
            shares.append(dict.fromkeys((unit for unit, _, _ in keys), 0.0))
            for stage in keys:
                of_stage = stages.state_shares(stage, num_copies=self.options.num_state_copies)
                own = sum(num_weights / (len(ranks) if self.options.zero_stage else 1) for ranks, num_weights in of_stage)
                shares[-1][stage[0]] += own / stages.tensor_size(stage)
        summing = max((sum(map(self._summing_seconds, keys)) for keys in held), default=0.0)
        if (profile := self.step_profile) is not None:
            per_unit, per_weight = profile.unit_update_seconds, profile.weight_update_seconds
            updating = (per_unit * sum(map(bool, share.values())) + per_weight * sum(share.values()) for share in shares)
            return summing + profile.seconds + max(updating)
        if cluster.memory_bandwidth_gbytes_per_second is None:
            return summing
        num_bytes = update_traffic_bytes(cluster.bytes_per_element) * max(sum(share.values()) for share in shares)
        return summing + num_bytes / (cluster.memory_bandwidth_gbytes_per_second * 1e9)

    def _summing_seconds(self, stage: StageKey) -> float:
        """Return the seconds before an update in which several copies of sharded weights sum the gradients of equal shares."""
        (unit, _, index), copies = stage, self.options.num_state_copies
        if self.options.zero_stage < 3 or copies is None:
            return 0.0
        replicas = self.stages.plan.units[unit].replicas
        peers = [each.virtual_stages[index].ranks[0] for each in replicas[:: max(1, len(replicas) // copies)]]
        num_weights = sum(weights / len(ranks) for ranks, weights in self.stages.state_shares(stage, num_copies=copies))
        num_bytes = GRADIENT_BYTES * num_weights / self.stages.tensor_size(stage)
        return 2 * collective_seconds(num_bytes, ranks=peers, cluster=self.layer_costs.cluster)


def _cost_of(kind: ActionKind, one: LayerSeconds, layer: str, need: BackwardNeed) -> tuple[float, float]:
    """Return the seconds of one layer in one computation, and the waits among them."""
    if kind is ActionKind.FORWARD:
        return one.forward, one.forward_waiting
    if kind is ActionKind.WEIGHT_GRADIENT:
        return (one.weight_gradient if need.trains_weights else 0.0), 0.0
    passes = LAYER_KINDS[layer].passes_gradient(need)
    waiting = one.input_gradient_waiting if passes else 0.0
    if kind is ActionKind.INPUT_GRADIENT:
        return (one.input_gradient if passes else 0.0), waiting
    return one.backward(layer, need), waiting


def update_traffic_bytes(bytes_per_element: int) -> float:
    """Return the bytes per weight that an update moves through memory.

    The gradient is read for its norm, read and written by clipping, and read by Adam, which reads and writes its state. The
    weight itself is written if that state includes an fp32 master weight, else also read.
    """
    gradient = max(GRADIENT_BYTES, bytes_per_element)
    return float(4 * gradient + 2 * optimizer_bytes(bytes_per_element) + bytes_per_element * (1 if bytes_per_element < 4 else 2))
