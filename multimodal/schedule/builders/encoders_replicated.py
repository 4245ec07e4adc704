"""Encoders-replicated: every LLM stage computes the encoders again (Llama's multimodal training; Cornstarch, figure 1b).

A baseline for planner and simulator: most of its work is redundant by design, so no run offers it. Repeated work is simulated as
additional microbatches of an encoder's copies whose outputs go nowhere.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.list_schedule import place_reductions
from multimodal.values.action import Action, ActionKind
from multimodal.values.arrays.microbatches import MicrobatchCounts, MicrobatchPlace, NumberedMicrobatches
from multimodal.values.arrays.routes import RouteEnds
from multimodal.values.arrays.rows import row_starts
from multimodal.values.assignment import Assignment, Routes
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.shape import StepShape


@dataclass(frozen=True)
class ReplicatedAssignment(Assignment):
    """An assignment whose encoders also compute, after their own microbatches, those of others; costs count both."""

    original: Assignment = field(default_factory=Assignment)
    """The assignment without repeated microbatches: it says which replicas compute the results that are used."""

    def routes(self, graph: ModelGraph) -> Routes:
        """Return the original's routes: no unit takes repeated results."""
        if graph.edges not in self._routes_by_edges:
            self._routes_by_edges[graph.edges] = self.original.routes(graph).among(self.placed)
        return self._routes_by_edges[graph.edges]

    def num_own_microbatches(self, unit: str, replica: int) -> int:
        """Return the number of microbatches in the original."""
        return self.original.num_microbatches(unit, replica)


def replicate_microbatches(shape: StepShape, assignment: Assignment) -> tuple[StepShape, Assignment]:
    """Give the encoders beside every LLM stage all microbatches that this LLM replica uses; O(routes x LLM stages).

    Raises ScheduleError if an encoder does not have exactly one replica, of one stage, on the ranks of each LLM stage.
    """
    _check_layout(shape.graph, shape.plan)
    units = dict(assignment.units)
    for encoder in (unit.name for unit in shape.graph.encoders):
        copies = range(shape.plan.units[encoder].data_parallel_size)
        rows = [_microbatches_of_copy(encoder, copy, shape) for copy in copies]
        units[encoder] = tuple(tuple(assignment.atoms(place) for place in row) for row in rows)
    repeated = ReplicatedAssignment(units, assignment)
    return repeated.shape(shape.graph, shape.plan, forward_only=shape.forward_only), repeated


def _microbatches_of_copy(encoder: str, copy: int, shape: StepShape) -> tuple[MicrobatchPlace, ...]:
    """Return the microbatches that an encoder's replica computes: its own, then others' in the order in which they are used."""
    backbone, plan = shape.graph.backbone.name, shape.plan
    beside, _ = plan.stage_of_ranks[backbone, plan.units[encoder].replicas[copy].ranks]
    own = [MicrobatchPlace(encoder, copy, number) for number in range(shape.num_microbatches(encoder, copy))]
    takers = [MicrobatchPlace(backbone, beside, number) for number in range(shape.num_microbatches(backbone, beside))]
    taken = (source for taker in takers for source in shape.routes.sources_of.get(taker, ()) if source.unit == encoder)
    return tuple(dict.fromkeys((*own, *taken)))


def build_encoders_replicated(shape: StepShape) -> Schedule:
    """Build the 1F1B of an LLM whose every stage holds whole encoders and runs them for each microbatch, in the compute dialect.

    The replica that originally has an encoder microbatch computes it for use. The copies beside the other stages of the LLM
    replica that uses it repeat its forward right before their stage's forward, and its backward, if the encoder has one, right
    after their stage's backward. Encoders whose results only their own stage uses run at the same places.

    shape: of the result of `replicate_microbatches`.
    """
    original = _without_repeated(shape)
    lanes = (_LaneWithEncoders(lane, original) for lane in build_one_f_one_b(original).lanes)
    return place_reductions(Schedule.of_lanes(shape, [lane_of(each.lane.ranks, each.actions()) for each in lanes]))


def _without_repeated(shape: StepShape) -> StepShape:
    """Return the shape without the microbatches of encoders that feed nobody: those that copies repeat."""
    counts = dict(shape.counts)
    for encoder in (unit.name for unit in shape.graph.encoders):
        edges = (shape.routes.of_edge(encoder, target)[0] for target in shape.graph.downstream(encoder))
        used = np.unique(np.concatenate(list(edges)))
        num_used = np.bincount(counts[encoder].replica_of_microbatch[used], minlength=counts[encoder].num_replicas)
        counts[encoder] = MicrobatchCounts(row_starts(num_used))
    there = shape.routes.microbatches
    numbered = NumberedMicrobatches({unit: counts[unit] for unit in there.units})
    ends = (there.numbers_in(numbered, numbers) for numbers in (shape.routes.sources, shape.routes.targets))
    return replace(shape, counts=counts, routes=RouteEnds(numbered, *ends))


class _LaneWithEncoders:
    """Rewrites one lane: encoder work, repeated or for this stage only, moves next to the LLM action that needs it."""

    def __init__(self, lane: Lane, original: StepShape) -> None:
        self.lane, self.graph, self.plan, self.original = lane, original.graph, original.plan, original
        graph, plan = original.graph, original.plan
        self.forward_of: dict[MicrobatchPlace, Action] = {}
        """Encoder microbatch -> its forward on these ranks, which runs when the LLM needs it."""
        for encoder in (unit.name for unit in graph.encoders if (unit.name, lane.ranks) in plan.stage_of_ranks):
            copy, _ = plan.stage_of_ranks[encoder, lane.ranks]
            for number, place in enumerate(_microbatches_of_copy(encoder, copy, original)):
                if place.replica != copy or self._stays_here(place):
                    self.forward_of[place] = Action(ActionKind.FORWARD, encoder, copy, 0, number)

    def _stays_here(self, place: MicrobatchPlace) -> bool:
        """Return True if an encoder's own microbatch is used only by the LLM's first stage on these ranks."""
        targets = self.original.routes.targets_of.get(place, ())
        return all(self.plan.virtual_stage(target.unit, target.replica, 0).ranks == self.lane.ranks for target in targets)

    def actions(self) -> Iterator[Action]:
        """Yield the lane's computations, without reductions."""
        moved = set(self.forward_of)
        actions = [
            action
            for action in self.lane.actions
            if action.kind is not ActionKind.REDUCE_GRADIENTS and action.microbatch_place not in moved
        ]
        num_left = Counter(each for action in actions if action.kind is ActionKind.BACKWARD for each in self._encoded_for(action))
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                waiting = [each for each in self._encoded_for(action) if each in moved]
                moved.difference_update(waiting)
                yield from (self.forward_of[each] for each in waiting)
            yield action
            if action.kind is ActionKind.BACKWARD:
                done = self._encoded_for(action)
                num_left.subtract(done)
                yield from (self._backward_of(each) for each in done if not num_left[each] and self._has_backward(each))

    def _encoded_for(self, action: Action) -> list[MicrobatchPlace]:
        """Return the microbatches that encoders on these ranks compute for an action of the LLM."""
        if action.unit != self.graph.backbone.name:
            return []
        target = action.microbatch_place
        return [source for source in self.original.routes.sources_of.get(target, ()) if source in self.forward_of]

    def _has_backward(self, place: MicrobatchPlace) -> bool:
        return self.original.backward_need(place.unit, place.replica, 0).has_backward

    def _backward_of(self, place: MicrobatchPlace) -> Action:
        return self.forward_of[place]._replace(kind=ActionKind.BACKWARD)


def _check_layout(graph: ModelGraph, plan: Plan) -> None:
    backbone = graph.backbone.name
    wanted = {stage.ranks for replica in plan.units[backbone].replicas for stage in replica.stages}
    for encoder in (unit.name for unit in graph.encoders):
        replicas = plan.units[encoder].replicas
        found = [[list(stage.ranks) for stage in replica.virtual_stages] for replica in replicas]
        if any(len(ranks) != 1 for ranks in found) or {stage.ranks for each in replicas for stage in each.stages} != wanted:
            raise ScheduleError(
                f"encoders-replicated needs a whole copy of '{encoder}' beside every stage of '{backbone}', {len(wanted)} "
                f"replicas of one stage on ranks {[list(ranks) for ranks in sorted(wanted)]}, found {found} (replica by replica, "
                f"its stages' ranks); give '{encoder}' pipeline size 1, the tensor parallel size of '{backbone}' and "
                f"{len(wanted)} replicas on those ranks in the plan, or choose 1f1b"
            )
