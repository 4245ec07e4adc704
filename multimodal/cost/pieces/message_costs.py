"""Costs of a step's messages: hidden states inside a unit, outputs of routed atoms between units, and their gradients."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import TransferCost, cost_between_nodes, cost_inside_node, exchange_cost
from multimodal.values.action import ActionKind
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.work.step_work import KIND_NUMBERS, StepWork

_INSIDE, _BETWEEN, _EXCHANGED = range(3)
_SEVERAL_NODES = -1


@dataclass(frozen=True)
class StageLinks:
    """Seconds per byte of a message between stages; stages are numbered as in `StepWork`."""

    graph: ModelGraph
    plan: Plan
    cluster: Cluster

    def of_messages(self, sources: Integers, targets: Integers, num_bytes: Integers) -> tuple[Floats, Floats, Integers]:
        """Return latencies, occupied seconds and links; inside one group of ranks, a message is an exchange of rows."""
        groups, nodes, costs = self._stages
        is_inside = (nodes[sources] == nodes[targets]) & (nodes[sources] != _SEVERAL_NODES)
        ways = np.where(groups[sources] == groups[targets], _EXCHANGED, np.where(is_inside, _INSIDE, _BETWEEN))
        latencies, seconds_per_byte, links = costs[ways, sources].T
        return latencies, num_bytes * seconds_per_byte, links.astype(np.int64)

    @cached_property
    def _stages(self) -> tuple[Integers, Integers, Floats]:
        """Return for each stage the number of its rank group, its node, and the cost of one byte by kind of link."""
        groups: dict[frozenset[int], int] = {}
        of_stages: list[int] = []
        nodes: list[int] = []
        costs: list[list[TransferCost]] = []
        for unit in self.graph.unit_names:
            plan = self.plan.units[unit]
            for stage in range(plan.num_virtual_stages):
                for replica in plan.replicas:
                    if stage >= len(replica.virtual_stages):
                        of_stages.append(0)
                        continue
                    ranks = replica.virtual_stages[stage].ranks
                    group = groups.setdefault(frozenset(ranks), len(groups))
                    if group == len(costs):
                        nodes.append(self.cluster.node(ranks[0]) if self.cluster.is_one_node(ranks) else _SEVERAL_NODES)
                        costs.append(self._ways(ranks))
                    of_stages.append(group)
        numbers = np.array(of_stages, np.int64)
        return numbers, np.array(nodes, np.int64)[numbers], np.array(costs, np.float64)[numbers].swapaxes(0, 1)

    def _ways(self, ranks: tuple[int, ...]) -> list[TransferCost]:
        """Return the cost of one byte from these ranks, by kind of link."""
        return [
            cost_inside_node(1.0, source_ranks=ranks, cluster=self.cluster),
            cost_between_nodes(1.0, source_ranks=ranks, cluster=self.cluster),
            exchange_cost(1.0, ranks=ranks, cluster=self.cluster),
        ]


@dataclass(frozen=True)
class MessageCosts:
    """Seconds of the messages of a step on its plan's links."""

    loads: AssignedLoads
    links: StageLinks

    def of_messages(self, work: StepWork, messages: Integers) -> tuple[Floats, Floats, Integers]:
        """Return latencies, occupied seconds and links of messages by their numbers in `work`."""
        producers, consumers = (ends[messages] for ends in work.message_ends)
        num_bytes = self.links.cluster.bytes_per_element * self._num_elements(work, producers, consumers)
        return self.links.of_messages(work.computed_stages[producers], work.computed_stages[consumers], num_bytes)

    def _num_elements(self, work: StepWork, producers: Integers, consumers: Integers) -> Integers:
        """Return the elements of the activations that travel between pieces; their gradients have as many."""
        is_forward = work.kinds[producers] == KIND_NUMBERS[ActionKind.FORWARD]
        sources, targets = np.where(is_forward, (producers, consumers), (consumers, producers))
        found, units = np.zeros(len(producers), np.int64), tuple(work.pieces.units)
        ends = (work.pieces.unit_of_stage[work.computed_stages[each]] for each in (sources, targets))
        edges = np.ravel_multi_index(tuple(ends), (len(units), len(units)))
        for edge in np.flatnonzero(np.bincount(edges)).tolist():
            (source, target), chosen = divmod(edge, len(units)), np.flatnonzero(edges == edge)
            if source == target:
                found[chosen] = self._inside(work, units[source], sources[chosen])
            else:
                numbers = (work.pieces.numbers_in_unit[each[chosen]] for each in (sources, targets))
                found[chosen] = self._between(units[source], units[target], *numbers)
        return found

    def _inside(self, work: StepWork, unit: str, sources: Integers) -> Integers:
        replicas, graph = self.loads.shape.plan.units[unit].replicas, self.loads.shape.graph
        stages = work.computed_stages[sources]
        ends, numbers = np.unique(stages, return_inverse=True)
        places = zip(work.pieces.replica_of_stage[ends].tolist(), work.pieces.index_of_stage[ends].tolist(), strict=True)
        layers = (replicas[replica].virtual_stages[index].layers for replica, index in places)
        hidden: Integers = np.array([graph.width_behind(unit, each.stop - 1) for each in layers], np.int64)[numbers]
        rows, parts, kept = work.pieces.numbers_in_unit[sources], work.pieces.parts[sources], self.loads.kept(unit)
        num_tokens = np.asarray(kept.whole.num_tokens + kept.cut.num_tokens)[rows]
        is_subset = (parts >= 0) & ~work.pieces.is_range[sources]
        if is_subset.any():
            subsets = self.loads.routes_from(unit).subset_starts[rows] + parts
            of_subsets = np.append(self.loads.of_subsets(unit).num_tokens, 0)
            num_tokens = np.where(is_subset, of_subsets[np.where(is_subset, subsets, -1)], num_tokens)
        return num_tokens * hidden

    def _between(self, source: str, target: str, sources: Integers, targets: Integers) -> Integers:
        graph, routes = self.loads.shape.graph, self.loads.routes_from(source).find(sources, targets, unit=target)
        if graph.unit(source).role is Role.ENCODER:
            num_rows = np.asarray(self.loads.of_routes(source).num_outputs)
            return num_rows[routes] * graph.width_behind(source, len(graph.unit(source).layers) - 1)
        return self.loads.num_conditions(source, target)[routes] * graph.unit(source).transformer.hidden_size
