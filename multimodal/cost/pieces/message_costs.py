"""Costs of a step's messages: hidden states inside a unit, outputs of routed atoms between units, and their gradients."""

from dataclasses import dataclass

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.pieces.stage_links import StageLinks
from multimodal.cost.unit_load import Floats
from multimodal.values.action import ActionKind
from multimodal.values.model_graph import Role
from multimodal.values.work.step_work import KIND_NUMBERS, Integers, StepWork


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
