"""Costs of a step from first principles: FLOPs over speed, bytes over bandwidth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds, exchange_cost, message_cost
from multimodal.cost.flops import step_flops
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.cost.seconds.layer_costs import LayerCosts, LayerSeconds
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.stage_layers import StageKey, StageLayers
from multimodal.cost.step_costs import ComputeCost, TransferCost
from multimodal.cost.step_memory import GRADIENT_BYTES, StepMemory
from multimodal.cost.unit_load import ComputedLoad, Floats, UnitLoad, add_loads
from multimodal.cost.update_seconds import update_seconds
from multimodal.values.action import Action, ActionKind, Coverage, Place
from multimodal.values.assignment import MicrobatchPlace, PlacedAtoms
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.dependencies import begins_early
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.step_graph import StepGraph

_OF_EVERY_BATCH = ("layer_costs", "stages", "_firsts_alike", "_stages_alike", "_links", "_alike")
"""Attributes of `ModelCosts`, computed when asked for, that hold for any samples under one plan."""
_OF_EVERY_ASSIGNMENT = (*_OF_EVERY_BATCH, "_compute_costs")
"""Those that hold for any placement of the same samples."""


@dataclass(frozen=True)
class ModelCosts:
    """`StepCosts` of one global batch on a cluster.

    A computation takes its layers' seconds (`LayerCosts`), with the waits for collectives inside them. A message is
    `num_tokens x hidden_size` elements. Replicas reduce fp32 gradients and gather the parameters of trained layers (ZeRO-1);
    where they share the weights themselves (ZeRO-3), every stage gathers them in every pass, while the layer before computes, and
    replicas go through it together: their microbatches of one number all take as long as the slowest of them.
    """

    step: StepGraph
    lengths: Sequence[SampleLengths]
    """The global batch that the step's assignment places."""
    cluster: Cluster
    vocab_size: int
    """Padded."""
    options: RunOptions = DEFAULT_OPTIONS
    profile: LayerProfile | None = None
    """Measured costs of layers, in place of what the cluster's description gives."""

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of single layers."""
        options = self.options
        return options.layer_costs(self.step.graph, self.cluster, self.vocab_size, self.profile, options.num_overlapped_parts)

    @cached_property
    def loads(self) -> AssignedLoads:
        """The load of each microbatch on its unit."""
        return AssignedLoads(self.step, self.lengths, self.options.item_block_size)

    @cached_property
    def stages(self) -> StageLayers:
        """The layers of each stage."""
        return StageLayers(self.step.graph, self.step.plan, self.vocab_size)

    @cached_property
    def memory(self) -> StepMemory:
        """Bytes of weights, activations and messages."""
        return StepMemory(self.stages, self.loads, self.options, self.cluster.bytes_per_element)

    @cached_property
    def model_flops(self) -> float:
        """Floating point operations that the model needs for the whole step."""
        return step_flops(self.step.graph, self.lengths, vocab_size=self.vocab_size)

    @property
    def peak_flops_per_second(self) -> float:
        """Peak FLOP/s of all ranks together."""
        return self.step.plan.num_ranks * self.cluster.peak_tflops * 1e12

    def compute(self, action: Action) -> ComputeCost:
        """Cost of one computation; the backward of a sample subset costs its atoms' share."""
        load = self.loads.computed_by(action)
        own = self._compute_cost(action.kind, action.unit, action.replica, action.stage, load)
        is_alone = action.microbatch >= self.step.assignment.num_own_microbatches(action.unit, action.replica)
        if self.options.zero_stage < 3 or is_alone or action.covers is not None:
            return own
        late = self._slowest_seconds(action.kind, action.unit, action.stage, action.microbatch) - own.seconds
        return ComputeCost(own.seconds + late, own.tensor_parallel_seconds + late)

    def stage_seconds(self, unit: str, replica: int, stage: int, *, kinds: Sequence[ActionKind]) -> float:
        """Return the seconds of a stage's computations of some kinds, over all microbatches."""
        places = [MicrobatchPlace(unit, replica, index) for index in range(self.step.num_microbatches(unit, replica))]
        if self.options.zero_stage < 3:
            loads = [self.loads.computed_at(place) for place in places]
            return sum(self._compute_cost(kind, unit, replica, stage, load).seconds for load in loads for kind in kinds)
        return sum(self._slowest_seconds(kind, unit, stage, place.microbatch) for place in places for kind in kinds)

    def unit_seconds(self, unit: str) -> Floats:
        """[num_stages, num_replicas] seconds of all forwards and backwards of each stage: `stage_seconds`, for all at once."""
        placed, plan = self.step.assignment.placed[unit], self.step.plan.units[unit]
        shape = plan.num_virtual_stages, placed.num_replicas
        total = np.zeros(shape)
        if plan.context_parallel_size > 1:
            for stage, replica in np.ndindex(shape):
                has_backward = self.step.backward_need(unit, replica, stage).has_backward
                kinds = (ActionKind.FORWARD, ActionKind.BACKWARD) if has_backward else (ActionKind.FORWARD,)
                total[stage, replica] = self.stage_seconds(unit, replica, stage, kinds=kinds)
            return total
        loads = self.loads.of_microbatches(unit)
        twice = np.repeat(placed.replica_of_microbatch, 2)
        for stage in range(shape[0]):
            seconds = self._seconds_of_microbatches(unit, stage, placed, loads)
            if self.options.zero_stage >= 3:
                seconds = self._with_the_slowest(unit, placed, seconds)
            total[stage] = np.bincount(twice, seconds.ravel(), shape[1])
        return total

    def _seconds_of_microbatches(self, unit: str, stage: int, placed: PlacedAtoms, loads: UnitLoad) -> Floats:
        """[num_microbatches, 2] seconds of forward and backward in one stage."""
        seconds = np.zeros((placed.num_microbatches, 2))
        for replicas in self._alike_replicas(unit, stage):
            chosen = np.flatnonzero(np.isin(placed.replica_of_microbatch, replicas))
            columns: list[Any] = [np.asarray(column)[chosen] for column in loads]
            own = UnitLoad(*columns)
            kinds = [ActionKind.FORWARD]
            if self.step.backward_need(unit, replicas[0], stage).has_backward:
                kinds.append(ActionKind.BACKWARD)
            for column, kind in enumerate(kinds):
                seconds[chosen, column] = self._sum_layers(kind, unit, replicas[0], stage, ComputedLoad(own)).seconds
        return seconds

    def _with_the_slowest(self, unit: str, placed: PlacedAtoms, seconds: Floats) -> Floats:
        """Return the seconds of the slowest replica's microbatch of each number: replicas with common weights wait for it."""
        counts = [self.step.assignment.num_own_microbatches(unit, replica) for replica in range(placed.num_replicas)]
        is_own = placed.index_in_replica < np.array(counts, np.int64)[placed.replica_of_microbatch]
        slowest = np.zeros((int(placed.counts.max(initial=0)), 2))
        np.maximum.at(slowest, placed.index_in_replica[is_own], seconds[is_own])
        return slowest[placed.index_in_replica]

    def _alike_replicas(self, unit: str, stage: int) -> list[list[int]]:
        """Return the replicas of a stage by what their computations take: the layers and the links between their ranks decide."""
        if (unit, stage) not in self._alike:
            groups: dict[object, list[int]] = {}
            for replica in range(self.step.plan.units[unit].data_parallel_size):
                counts = self.stages.counts((unit, replica, stage))
                need = self.step.backward_need(unit, replica, stage)
                links = [self.layer_costs.collectives(unit, layer, **self._sharing(unit, replica, stage)) for layer, _ in counts]
                key = replica if self.options.zero_stage >= 3 else (tuple(counts.items()), tuple(links), need)
                groups.setdefault(key, []).append(replica)
            self._alike[unit, stage] = list(groups.values())
        return self._alike[unit, stage]

    @cached_property
    def _alike(self) -> dict[tuple[str, int], list[list[int]]]:
        return {}

    def of_batch(self, step: StepGraph, lengths: Sequence[SampleLengths]) -> "ModelCosts":
        """Return the costs of other samples under the same plan; keeps results that depend on no sample."""
        other = replace(self, step=step, lengths=lengths)
        for name in _OF_EVERY_BATCH:
            other.__dict__[name] = getattr(self, name)
        return other

    def of_step(self, step: StepGraph) -> "ModelCosts":
        """Return the costs of the same samples placed otherwise; keeps results that do not depend on the placement."""
        other = replace(self, step=step)
        for name in _OF_EVERY_ASSIGNMENT:
            other.__dict__[name] = getattr(self, name)
        return other

    def transfer(self, send: Action) -> TransferCost:
        """Cost of the message that a send starts: inside a unit its hidden states, between units the routed atoms' outputs."""
        assert send.peer is not None, f"{send} has no peer"
        source, target = (send.place, send.peer) if send.kind is ActionKind.SEND_FORWARD else (send.peer, send.place)
        num_bytes = self.cluster.bytes_per_element * self._num_elements(source, target, covers=send.covers)
        latency_seconds, seconds_per_byte, link = self._link(send[1:4], send.peer[:3])
        return TransferCost(latency_seconds, num_bytes * seconds_per_byte, link)

    def collective_seconds(self, action: Action) -> float:
        """Seconds of gathering a stage's parameters or reducing its gradients (fp32) over the unit's replicas."""
        if self.options.zero_stage >= 3:
            return 0.0
        is_reduction = action.kind is ActionKind.REDUCE_GRADIENTS
        bytes_per_weight = GRADIENT_BYTES if is_reduction else self.cluster.bytes_per_element
        num_passes = 1 if self.options.zero_stage else 2 if is_reduction else 0  # without sharing: one all-reduce
        stage = (action.unit, action.replica, action.stage)
        seconds = num_passes * self._over_replicas(stage, bytes_per_weight, trained_only=True)
        return seconds if action.covers is None else self._reduction_piece_seconds(action, seconds)

    def _reduction_piece_seconds(self, reduction: Action, whole_seconds: float) -> float:
        """Return the seconds of a piece of a reduction by layer: the first layer, which a backward passes last, or all others.

        These are taken to begin with that backward, though they wait for its first layer: what that takes is left out.
        """
        weights = self.stages.trained_weights(reduction[1:4])
        share = weights[0] / sum(weights)
        return whole_seconds * (1 - share if begins_early(reduction) else share)

    @cached_property
    def update_seconds(self) -> float:
        """Seconds from the last backward and reduction to the end of the step: the optimizer, and a profile's other work."""
        step = self.profile.step if self.profile is not None else None
        return update_seconds(self.stages, options=self.options, cluster=self.cluster, profile=step)

    def activation_bytes(self, place: Place) -> int:
        """Bytes per rank that one microbatch keeps in one stage."""
        return self.memory.activation_bytes(place)

    def static_bytes(self, lane: int) -> int:
        """Bytes per rank of weights, gradients and optimizer state of all stages that a lane holds, and of one layer's work."""
        return self.memory.static_bytes(self.step.plan.lanes[lane][0])

    def _over_replicas(self, stage: StageKey, bytes_per_weight: float, *, trained_only: bool) -> float:
        """Seconds of one ring over all ranks that have the same shard of a stage's weights."""
        unit = self.step.plan.units[stage[0]]
        size = unit.tensor_parallel_size
        num_weights = self.stages.num_weights(stage, trained_only=trained_only) / size
        peers = [rank for replica in unit.replicas for rank in replica.virtual_stages[stage[2]].ranks[::size]]
        return collective_seconds(bytes_per_weight * num_weights, ranks=peers, cluster=self.cluster)

    def _num_elements(self, source: Place, target: Place, *, covers: Coverage) -> int:
        """Elements of the activations that travel from `source` to `target`; gradients have as many."""
        hidden = self.step.graph.unit(source.unit).transformer.hidden_size
        if source.unit == target.unit and covers is None:
            kept = self.loads.kept_at(MicrobatchPlace(source.unit, source.replica, source.microbatch))
            return add_loads(kept).num_tokens * hidden
        if source.unit == target.unit:
            return self.loads.of_action(Action(ActionKind.BACKWARD, *source, covers=covers)).num_tokens * hidden
        here = MicrobatchPlace(source.unit, source.replica, source.microbatch)
        there = MicrobatchPlace(target.unit, target.replica, target.microbatch)
        routes = self.step.routes.from_source[here]
        atoms = next(route.atoms for route in routes if route.target == there)
        if self.step.graph.unit(source.unit).role is Role.ENCODER:
            num_rows = self.loads.of_atoms(source.unit, atoms).num_outputs
            return num_rows * self.step.graph.unit(target.unit).transformer.hidden_size
        return self.loads.num_conditions(target.unit, atoms) * hidden

    @cached_property
    def _links(self) -> dict[tuple[StageKey, StageKey], TransferCost]:
        return {}

    def _link(self, source: StageKey, target: StageKey) -> TransferCost:
        """Return the cost of one byte between two stages; inside one group of ranks, a message is an exchange of rows."""
        if (source, target) not in self._links:
            ranks, others = (self.step.plan.virtual_stage(*stage).ranks for stage in (source, target))
            self._links[source, target] = (
                exchange_cost(1.0, ranks=ranks, cluster=self.cluster)
                if set(ranks) == set(others)
                else message_cost(1.0, source_ranks=ranks, target_ranks=others, cluster=self.cluster)
            )
        return self._links[source, target]

    def _slowest_seconds(self, kind: ActionKind, unit: str, stage: int, microbatch: int) -> float:
        """Return the seconds of the slowest replica's microbatch of this number: replicas with common weights wait for it."""
        key = kind, unit, stage, microbatch
        if key not in self._slowest:
            self._slowest[key] = max(
                self._compute_cost(
                    kind, unit, replica, stage, self.loads.computed_at(MicrobatchPlace(unit, replica, microbatch))
                ).seconds
                for replica in range(self.step.plan.units[unit].data_parallel_size)
                if microbatch < self.step.assignment.num_own_microbatches(unit, replica)
            )
        return self._slowest[key]

    @cached_property
    def _slowest(self) -> dict[tuple[ActionKind, str, int, int], float]:
        return {}

    @cached_property
    def _compute_costs(self) -> dict[tuple[ActionKind, StageKey, ComputedLoad], ComputeCost]:
        return {}

    def _compute_cost(self, kind: ActionKind, unit: str, replica: int, stage: int, load: ComputedLoad) -> ComputeCost:
        alike = self._first_alike((unit, replica, stage))
        key = kind, alike, load
        if key not in self._compute_costs:
            self._compute_costs[key] = self._sum_layers(kind, *alike, load)
        return self._compute_costs[key]

    def _first_alike(self, stage: StageKey) -> StageKey:
        """The first stage asked for whose computations take as long: the layers decide, unless ranks work on them together."""
        if stage not in self._firsts_alike:
            sizes = self.step.plan.units[stage[0]]
            is_alone = sizes.tensor_parallel_size * sizes.context_parallel_size == 1 and self.options.zero_stage < 3
            like = stage[0], tuple(self.stages.counts(stage).items()), None if is_alone else stage
            self._firsts_alike[stage] = self._stages_alike.setdefault(like, stage)
        return self._firsts_alike[stage]

    @cached_property
    def _firsts_alike(self) -> dict[StageKey, StageKey]:
        return {}

    @cached_property
    def _stages_alike(self) -> dict[tuple[object, ...], StageKey]:
        return {}

    def _sum_layers(self, kind: ActionKind, unit: str, replica: int, stage: int, load: ComputedLoad) -> ComputeCost:
        seconds, waiting = 0.0, 0.0
        sharing = self._sharing(unit, replica, stage)
        for (layer, need), count in self.stages.counts((unit, replica, stage)).items():
            one = self.layer_costs.seconds(unit, layer, load.all, cut=load.cut, **sharing)
            cost = _cost_of(kind, one, layer, need)
            seconds, waiting = seconds + count * cost.seconds, waiting + count * cost.tensor_parallel_seconds
        is_busy = load.all.num_tokens > 0  # or arrays of them
        if self.profile is not None and self.profile.step is not None and kind is not ActionKind.WEIGHT_GRADIENT:
            seconds = seconds + is_busy * self.profile.step.computation_seconds
        late = self._gathering_seconds(kind, (unit, replica, stage)) - seconds
        late = is_busy * (late > 0) * late
        return ComputeCost(seconds + late, waiting + late)

    def _sharing(self, unit: str, replica: int, stage: int) -> dict[str, Any]:
        """Return how the ranks of a stage share a layer, as arguments of `LayerCosts.seconds`."""
        sizes = self.step.plan.units[unit]
        return {
            "tensor_parallel_size": sizes.tensor_parallel_size,
            "context_parallel_size": sizes.context_parallel_size,
            "recompute": self.options.recompute,
            "ranks": self.step.plan.virtual_stage(unit, replica, stage).ranks,
        }

    def _gathering_seconds(self, kind: ActionKind, stage: StageKey) -> float:
        """Seconds in which a stage's weights come, and its gradients go, while it computes; 0 where replicas keep all weights."""
        if self.options.zero_stage < 3:
            return 0.0
        gathering = self._over_replicas(stage, self.cluster.bytes_per_element, trained_only=False)
        reducing = self._over_replicas(stage, GRADIENT_BYTES, trained_only=True)
        if kind is ActionKind.WEIGHT_GRADIENT:
            return reducing
        return gathering + (0.0 if kind is ActionKind.FORWARD else reducing)


def _cost_of(kind: ActionKind, one: LayerSeconds, layer: str, need: BackwardNeed) -> ComputeCost:
    """Return what one computation asks of one layer."""
    if kind is ActionKind.FORWARD:
        return ComputeCost(one.forward, one.forward_waiting)
    if kind is ActionKind.WEIGHT_GRADIENT:
        return ComputeCost(one.weight_gradient if need.trains_weights else 0.0)
    passes = LAYER_KINDS[layer].passes_gradient(need)
    waiting = one.input_gradient_waiting if passes else 0.0
    if kind is ActionKind.INPUT_GRADIENT:
        return ComputeCost(one.input_gradient if passes else 0.0, waiting)
    return ComputeCost(one.backward(layer, need), waiting)
