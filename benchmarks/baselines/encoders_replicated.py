"""A copy of every encoder in each of the LLM's stages, which is predicted and never run (Cornstarch 2 compares with it)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.baselines.one_grid import with_replicas
from multimodal.plan.planners.allowed_sizes import (
    data_parallel_sizes,
    pipeline_parallel_sizes,
    shared_stage_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import Builder
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.list_schedule import place_reductions
from multimodal.values.action import Action, ActionKind
from multimodal.values.arrays.microbatches import MicrobatchPlace, NumberedMicrobatches
from multimodal.values.arrays.routes import Routes
from multimodal.values.arrays.rows import integers
from multimodal.values.assignment import Assignment, PlacedAtoms
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.schedule import Lane, Schedule, lane_of
from multimodal.values.shape import StepShape

NOTE = (
    "encoders-replicated is a baseline that is predicted and never run: every stage of the LLM runs all encoders, which would be "
    "useless work in a run; its prediction is 1F1B with that work"
)


def plan_encoders_replicated(request: PlanningRequest) -> PlannedRun:
    """Plan the LLM alone, and give every one of its stages a replica of each encoder with the same tp and cp.

    An encoder then has dp x pp (of the LLM) replicas of one stage each. Generators get ranks of their own behind the LLM. Raises
    PlanError if nothing fits, or dp or pp of an encoder are fixed to other sizes.
    """
    chosen, seconds = choose_candidates(request, _replicated_candidates(request))[0]
    run = _replicate(request, chosen).to_run(request, seconds=seconds, schedule="1f1b")
    if request.graph.encoders and chosen.layouts[request.graph.backbone.name].pipeline_parallel_size > 1:
        return replace(run, predicted_as=repeat_encoders, notes=(NOTE,))
    return run


def _replicated_candidates(request: PlanningRequest) -> Iterator[Candidate]:
    """Yield each LLM layout with encoders of its dp, as many of whose microbatches run on each of its stages."""
    graph, backbone = request.graph, request.graph.backbone.name
    together = (*(unit.name for unit in graph.encoders), backbone)
    for size in shared_stage_sizes(request, together):
        for pipeline in pipeline_parallel_sizes(request, backbone):
            layouts = {unit.name: even_layout(unit, size, 1, pipeline if unit.name == backbone else 1) for unit in graph.units}
            yield from with_replicas(request, layouts, data_parallel_sizes(request, backbone), groups=(together,))


def _replicate(request: PlanningRequest, candidate: Candidate) -> Candidate:
    graph = request.graph
    llm = candidate.layouts[graph.backbone.name]
    count = llm.data_parallel_size * llm.pipeline_parallel_size
    for unit in graph.encoders:
        fixed = request.fixed(unit.name)
        if fixed.data_parallel_size not in (None, count) or fixed.pipeline_parallel_size not in (None, 1):
            raise PlanError(
                f"encoders-replicated gives '{unit.name}' pp 1 and dp {count}, one replica per stage of the LLM, but other sizes "
                "are fixed; unfix them or choose another planner"
            )
    encoders = {unit.name: even_layout(unit, llm.size, count, 1) for unit in graph.encoders}
    return replace(candidate, layouts={**candidate.layouts, **encoders})


def repeat_encoders(original: StepShape, assignment: Assignment) -> tuple[Assignment, Builder]:
    """Return the step whose encoders also compute, after their own microbatches, those that others compute for their LLM stage.

    Each encoder has a replica of one stage on the ranks of every LLM stage. The first result is the assignment with the repeated
    microbatches, for costs, O(routes x LLM stages); the second builds the 1F1B of an LLM whose every stage runs the encoders for
    each microbatch, in the compute dialect, from the shape of that assignment. Copies repeat the forward of an encoder's
    microbatch right before their stage's forward, and its backward, if there is one, right after their stage's backward; so do
    encoders whose results only their own stage uses.
    """
    placed = dict(assignment.placed)
    for encoder in (unit.name for unit in original.graph.encoders):
        copies = range(original.plan.units[encoder].data_parallel_size)
        rows = [_microbatches_of_copy(encoder, copy, original) for copy in copies]
        placed[encoder] = PlacedAtoms.of_replicas([list(map(assignment.atoms, row)) for row in rows])

    def build(shape: StepShape) -> Schedule:
        lanes = (_LaneWithEncoders(lane, original) for lane in build_one_f_one_b(original).lanes)
        return place_reductions(Schedule.of_lanes(shape, [lane_of(each.lane.ranks, each.actions()) for each in lanes]))

    return _RepeatedAssignment(placed, assignment), build


@dataclass(frozen=True)
class _RepeatedAssignment(Assignment):
    original: Assignment

    def routes(self, graph: ModelGraph) -> Routes:
        """Return the original's routes: no unit takes repeated results. They come behind those that a replica has itself."""
        routes = self.original.routes(graph)
        numbered = NumberedMicrobatches({unit: self.placed[unit] for unit in routes.microbatches.units})
        sources, targets = (
            integers(map(numbered.number, routes.microbatches.places(ends))) for ends in (routes.sources, routes.targets)
        )
        return replace(routes, microbatches=numbered, sources=sources, targets=targets)


def _microbatches_of_copy(encoder: str, copy: int, shape: StepShape) -> tuple[MicrobatchPlace, ...]:
    """Return the microbatches that an encoder's replica computes: its own, then others' in the order in which they are used."""
    backbone, plan = shape.graph.backbone.name, shape.plan
    ranks = plan.units[encoder].replicas[copy].ranks
    beside = next(index for index, replica in enumerate(plan.units[backbone].replicas) if set(ranks) <= set(replica.ranks))
    own = [MicrobatchPlace(encoder, copy, number) for number in range(shape.num_microbatches(encoder, copy))]
    takers = [MicrobatchPlace(backbone, beside, number) for number in range(shape.num_microbatches(backbone, beside))]
    taken = (source for taker in takers for source in shape.routes.sources_of.get(taker, ()) if source.unit == encoder)
    return tuple(dict.fromkeys((*own, *taken)))


class _LaneWithEncoders:
    """Rewrites one lane: encoder work, repeated or for this stage only, moves next to the LLM action that needs it."""

    def __init__(self, lane: Lane, original: StepShape) -> None:
        self.lane, self.original = lane, original
        graph, plan = original.graph, original.plan
        self.forward_of: dict[MicrobatchPlace, Action] = {}
        """Encoder microbatch -> its forward on these ranks, which runs when the LLM needs it."""
        for encoder, copy in (
            (unit.name, copy)
            for unit in graph.encoders
            for copy, replica in enumerate(plan.units[unit.name].replicas)
            if replica.ranks == lane.ranks
        ):
            for number, place in enumerate(_microbatches_of_copy(encoder, copy, original)):
                targets = original.routes.targets_of.get(place, ())
                stays = all(plan.virtual_stage(each.unit, each.replica, 0).ranks == lane.ranks for each in targets)
                if place.replica != copy or stays:  # its own stays if only the LLM's first stage on these ranks uses it
                    self.forward_of[place] = Action(ActionKind.FORWARD, encoder, copy, 0, number)

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
                for each in (each for each in done if not num_left[each]):
                    if self.original.backward_need(each.unit, each.replica, 0).has_backward:
                        yield self.forward_of[each]._replace(kind=ActionKind.BACKWARD)

    def _encoded_for(self, action: Action) -> list[MicrobatchPlace]:
        """Return the microbatches that encoders on these ranks compute for an action of the LLM."""
        if action.unit != self.original.graph.backbone.name:
            return []
        target = action.microbatch_place
        return [source for source in self.original.routes.sources_of.get(target, ()) if source in self.forward_of]
