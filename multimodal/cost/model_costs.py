"""Costs of a step from first principles: FLOPs over speed, bytes over bandwidth; and those of its messages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import Cluster, TransferCost, cost_between_nodes, cost_inside_node, exchange_cost
from multimodal.cost.flops import step_flops
from multimodal.cost.pieces.computation_seconds import ComputationSeconds
from multimodal.cost.pieces.stage_costs import StageCosts
from multimodal.cost.run_options import DEFAULT_OPTIONS, RunOptions
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_costs import ComputeCost, PieceCosts
from multimodal.cost.step_memory import GRADIENT_BYTES, StepMemory
from multimodal.values.action import Action, ActionKind, LayerRange
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import COLLECTIVE, COMPUTE, SEND, StepWork

_INSIDE, _BETWEEN, _EXCHANGED = range(3)
_SEVERAL_NODES = -1
_OF_EVERY_BATCH = ("layer_costs", "stages", "stage_costs", "_stage_links")
"""Attributes of `ModelCosts`, computed on first access, that hold for any samples under one plan."""


@dataclass(frozen=True)
class ModelCosts:
    """`StepCosts` of one global batch on a cluster.

    A computation takes its layers' seconds (`LayerCosts`), with the waits for collectives inside them. A message is
    `num_tokens x hidden_size` elements. Replicas reduce fp32 gradients and gather the parameters of trained layers (ZeRO-1);
    if replicas share the weights themselves (ZeRO-3), every stage gathers them in every pass while the layer before computes, and
    replicas run in lockstep: their microbatches of one number all take as long as the slowest of them.
    """

    shape: StepShape
    assignment: Assignment
    lengths: Sequence[SampleLengths]
    cluster: Cluster
    vocab_size: int
    options: RunOptions = DEFAULT_OPTIONS
    profile: LayerProfile | None = None
    """Measured costs of layers, used instead of those that follow from the cluster's description."""

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of single layers."""
        options = self.options
        return options.layer_costs(self.shape.graph, self.cluster, self.vocab_size, self.profile, options.num_overlapped_parts)

    @cached_property
    def loads(self) -> AssignedLoads:
        """The load of each microbatch on its unit."""
        return AssignedLoads(self.shape, self.assignment, self.lengths, self.options.item_block_size)

    @cached_property
    def stages(self) -> StageLayers:
        """The layers of each stage."""
        return StageLayers(self.shape.graph, self.shape.plan, self.vocab_size)

    @cached_property
    def stage_costs(self) -> StageCosts:
        """Costs of stages by load."""
        return StageCosts(self.layer_costs, self.stages, self.options)

    @cached_property
    def memory(self) -> StepMemory:
        """Bytes of weights, activations and messages."""
        return StepMemory(self.stages, self.loads, self.options, self.cluster.bytes_per_element)

    @cached_property
    def model_flops(self) -> float:
        """Floating point operations that the model needs for the whole step."""
        return step_flops(self.shape.graph, self.lengths, vocab_size=self.vocab_size)

    @property
    def peak_flops_per_second(self) -> float:
        """Peak FLOP/s of all ranks together."""
        return self.shape.plan.num_ranks * self.cluster.peak_tflops * 1e12

    @property
    def memory_bytes(self) -> float:
        """Bytes of an accelerator's memory."""
        return self.cluster.memory_gb * 1e9

    @cached_property
    def computations(self) -> ComputationSeconds:
        """Seconds of computations."""
        return ComputationSeconds(self.loads, self.stage_costs)

    def compute(self, action: Action) -> ComputeCost:
        """Cost of one computation; the backward of a sample subset costs its atoms' share."""
        return self.computations.of_action(action)

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Costs of pieces by their numbers."""
        found, resources = PieceCosts.nothing(len(pieces)), work.resources[pieces]
        computed, sent, joined = (np.flatnonzero(resources == each) for each in (COMPUTE, SEND, COLLECTIVE))
        found.seconds[computed], found.tensor_parallel_seconds[computed] = self.computations.of_pieces(work, pieces[computed])
        producers, consumers = (ends[(pieces[sent] - work.num_computed) // 2] for ends in work.message_ends)
        num_bytes = self.cluster.bytes_per_element * self.loads.num_elements(work, producers, consumers)
        groups, nodes, costs = self._stage_links
        sources, targets = work.computed_stages[producers], work.computed_stages[consumers]
        is_inside = (nodes[sources] == nodes[targets]) & (nodes[sources] != _SEVERAL_NODES)
        # Inside one group of ranks, a message is an exchange of rows.
        ways = np.where(groups[sources] == groups[targets], _EXCHANGED, np.where(is_inside, _INSIDE, _BETWEEN))
        latencies, seconds_per_byte, links = costs[ways, sources].T
        found.latency_seconds[sent], found.seconds[sent], found.links[sent] = latencies, num_bytes * seconds_per_byte, links
        found.seconds[joined] = self._of_collectives(work, pieces[joined])
        return found

    def _of_collectives(self, work: StepWork, pieces: Integers) -> Floats:
        """[num_pieces] seconds of collectives, computed once for all replicas of a unit where these are alike."""
        units = (self.shape.plan.units[unit] for unit in work.pieces.units)
        is_alike = np.array([not unit.is_unlike for unit in units], bool) & (self.options.num_state_copies is None)
        stages = work.computed_stages[pieces]
        first_stages = stages - work.replicas[pieces] * is_alike[work.pieces.unit_of_stage[stages]]
        keys = np.stack((first_stages, work.kinds[pieces], work.pieces.parts[pieces]))
        _, first, which = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        seconds = [self.collective_seconds(work.action(piece)) for piece in pieces[first].tolist()]
        return np.array(seconds, np.float64)[which.ravel()]

    @cached_property
    def _stage_links(self) -> tuple[Integers, Integers, Floats]:
        """For each stage, numbered as in `StepWork`: its rank group, its node, and the cost of one byte by kind of link."""
        groups: dict[frozenset[int], int] = {}
        of_stages, nodes, costs = list[int](), list[int](), list[list[TransferCost]]()
        for plan in (self.shape.plan.units[unit] for unit in self.shape.graph.unit_names):
            for stage, replica in product(range(plan.num_virtual_stages), plan.replicas):
                if stage >= len(replica.virtual_stages):
                    of_stages.append(0)
                    continue
                ranks = replica.virtual_stages[stage].ranks
                group = groups.setdefault(frozenset(ranks), len(groups))
                if group == len(costs):
                    nodes.append(self.cluster.node(ranks[0]) if self.cluster.is_one_node(ranks) else _SEVERAL_NODES)
                    inside = cost_inside_node(1.0, source_ranks=ranks, cluster=self.cluster)
                    between = cost_between_nodes(1.0, source_ranks=ranks, cluster=self.cluster)
                    costs.append([inside, between, exchange_cost(1.0, ranks=ranks, cluster=self.cluster)])
                of_stages.append(group)
        numbers = np.array(of_stages, np.int64)
        return numbers, np.array(nodes, np.int64)[numbers], np.array(costs, np.float64)[numbers].swapaxes(0, 1)

    def waits(self, work: StepWork, pieces: Integers) -> tuple[Integers, Floats]:
        """Seconds of the waits inside computations in which other work can run, as rows (starts, seconds)."""
        return self.computations.waits(work, pieces)

    def of_batch(self, shape: StepShape, assignment: Assignment, lengths: Sequence[SampleLengths]) -> "ModelCosts":
        """Return the costs of other samples or another assignment under the same plan; keeps values that depend on neither."""
        other = replace(self, shape=shape, assignment=assignment, lengths=lengths)
        for name in _OF_EVERY_BATCH:
            other.__dict__[name] = getattr(self, name)
        return other

    def collective_seconds(self, action: Action) -> float:
        """Seconds of gathering a stage's parameters or reducing its gradients (fp32) over the unit's replicas."""
        if self.options.zero_stage >= 3:
            return 0.0
        is_reduction = action.kind is ActionKind.REDUCE_GRADIENTS
        bytes_per_weight = GRADIENT_BYTES if is_reduction else self.cluster.bytes_per_element
        num_passes = 1 if self.options.zero_stage else 2 if is_reduction else 0  # without sharing: one all-reduce
        stage = (action.unit, action.replica, action.stage)
        is_unlike = self.shape.plan.units[action.unit].is_unlike
        if is_unlike or self.options.num_state_copies is not None:  # all-reduces, and gathers among those who share a copy
            if not is_reduction:
                return self.stage_costs.over_sharers(stage) if self.options.zero_stage else 0.0
            if is_unlike:
                return 2 * self.stage_costs.over_unlike(action)
            num_passes = 2
        seconds = num_passes * self.stage_costs.over_replicas(stage, bytes_per_weight, trained_only=True)
        if action.covers is None:
            return seconds
        # A reduction by layer: the first layer is reached last by a backward; the pieces of all others are assumed to begin with
        # that backward, and the time until its first layer is done is left out.
        weights = self.stages.trained_weights(stage)
        share = weights[0] / sum(weights)
        return seconds * (share if action.covers == LayerRange(0, 1) else 1 - share)

    @cached_property
    def update_seconds(self) -> float:
        """Seconds from the last backward and reduction to the end of the step: the optimizer, and a profile's other work."""
        return self.stage_costs.update_seconds()

    def kept_bytes(self, work: StepWork, forwards: Integers) -> Integers:
        """Bytes per rank that the microbatches of these forwards keep in their stages."""
        found, stages = np.zeros(len(forwards), np.int64), work.computed_stages[forwards]
        for number, (unit, pieces) in enumerate(work.pieces.units.items()):
            chosen = np.flatnonzero(work.pieces.unit_of_stage[stages] == number)
            places = work.pieces.index_of_stage[stages[chosen]], work.pieces.numbers_in_unit[forwards[chosen]]
            found[chosen] = self.memory.kept_bytes(unit)[places]
            if pieces.is_cut:
                is_cut = (pieces.num_forwards > 1) | (pieces.num_backwards > 1)
                found[chosen] += (is_cut * self.memory.cut_bytes(unit))[places]
        return found

    def static_bytes(self, lane: int) -> int:
        """Bytes per rank of weights, gradients and optimizer state of all stages of a lane, and of the work on one layer."""
        return self.memory.static_bytes(self.shape.plan.lanes[lane][0])
