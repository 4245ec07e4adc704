"""Encoders-replicated: every stage of the LLM computes the encoders anew (Llama's multimodal training; Cornstarch, figure 1b)."""

from collections import defaultdict, deque
from collections.abc import Iterator

from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.dependencies import dependencies
from multimodal.schedule.place_reductions import place_reductions
from multimodal.schedule.repeated_work import consumers_beside, copy_beside
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Place, Schedule
from multimodal.values.schedule_form import ScheduleForm

_REPEATING = ScheduleForm(repeats_encoders=True)


def build_encoders_replicated(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the 1F1B of an LLM whose every stage holds whole encoders and runs them for each microbatch, in the compute dialect.

    Whoever the assignment gives an encoder microbatch computes it for real. The copies beside the other stages of the LLM
    replica that takes it repeat its forward right before their stage's forward, and its backward, where the encoder has one,
    right after their stage's backward. What they compute is dropped, and their backward begins with a gradient of zero, so
    training is exact; in models where every stage attends to the encoders' output (Llama) it would be used.

    Raises ScheduleError when an encoder does not have one replica of one stage on each LLM stage's ranks.
    """
    _check_layout(graph, plan)
    schedule = build_one_f_one_b(graph, plan, assignment, forward_only=forward_only)
    lanes = tuple(
        Lane(lane.ranks, tuple(_LaneWithEncoders(graph, plan, assignment, forward_only).actions(lane))) for lane in schedule.lanes
    )
    if forward_only:
        return Schedule(lanes)
    return place_reductions(Schedule(lanes), graph=graph, plan=plan, assignment=assignment)


class _LaneWithEncoders:
    """Rewrites one lane: encoders run right beside the LLM's actions that need them, be it repeated or for this stage alone."""

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment, forward_only: bool) -> None:
        self.graph, self.plan, self.assignment, self.forward_only = graph, plan, assignment, forward_only
        self.put_off: dict[str, deque[Action]] = defaultdict(deque)
        self.done: set[Action] = set()
        self.num_to_come: dict[Action, int] = {}
        self.followed_by: dict[Action, list[Action]] = defaultdict(list)

    def actions(self, lane: Lane) -> Iterator[Action]:
        """The lane's computations, without reductions."""
        for action in (action for action in lane.actions if action.kind is not ActionKind.REDUCE_GRADIENTS):
            is_encoder = action.unit in self.graph.upstream(self.graph.backbone.name)
            if is_encoder and self._stays_here(action):
                if action.kind is ActionKind.FORWARD:
                    self.put_off[action.unit].append(action)
                continue
            if action.kind is ActionKind.FORWARD:
                yield from self._encode(action) if not is_encoder else self._catch_up(action.unit, action.microbatch - 1)
            yield action
            yield from self._follow(action)

    def _stays_here(self, action: Action) -> bool:
        """Whether the LLM's first stage on these ranks is all that takes an encoder's microbatch."""
        routes = self.assignment.routes(self.graph).from_source[MicrobatchPlace(action.unit, action.replica, action.microbatch)]
        firsts = (Place(route.target.unit, route.target.replica, 0, route.target.microbatch) for route in routes)
        return all(copy_beside(first, action.unit, plan=self.plan) == action.replica for first in firsts)

    def _encode(self, forward: Action) -> Iterator[Action]:
        """What a forward of the LLM needs of the encoders on its ranks and has not been done."""
        for need in dependencies(forward, self.graph, self.plan, self.assignment, form=_REPEATING):
            if need.kind is ActionKind.REPEATED_FORWARD and need not in self.done:
                yield self._begin(need)
            elif need in self.put_off[need.unit]:
                yield from self._catch_up(need.unit, need.microbatch)

    def _catch_up(self, unit: str, microbatch: int) -> Iterator[Action]:
        """Forwards that were put off, up to a microbatch: a stage keeps their order."""
        while self.put_off[unit] and self.put_off[unit][0].microbatch <= microbatch:
            yield self._begin(self.put_off[unit].popleft())

    def _begin(self, forward: Action) -> Action:
        """Note when the backward can follow; returns the forward."""
        self.done.add(forward)
        if not self.forward_only and stage_backward_need(self.graph, self.plan, *forward[1:4]).has_backward:
            consumers = consumers_beside(
                forward.work, forward.replica, graph=self.graph, plan=self.plan, assignment=self.assignment
            )
            self.num_to_come[forward] = len(consumers)
            for place in consumers:
                self.followed_by[Action(ActionKind.BACKWARD, *place)].append(forward)
        return forward

    def _follow(self, backward: Action) -> Iterator[Action]:
        """The encoders' backwards for which this was the last gradient to come."""
        for forward in self.followed_by[backward]:
            self.num_to_come[forward] -= 1
            if self.num_to_come[forward] == 0:
                yield forward._replace(kind=_BACKWARD_OF[forward.kind])


_BACKWARD_OF = {
    ActionKind.FORWARD: ActionKind.BACKWARD,
    ActionKind.REPEATED_FORWARD: ActionKind.REPEATED_BACKWARD,
}


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
