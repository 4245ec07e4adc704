"""The one dependency function: what must have happened before an action may run."""

from collections.abc import Callable, Iterator, Mapping

from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Place
from multimodal.values.schedule_form import PLAIN, ScheduleForm, parts_of

_Rule = Callable[[Action, ModelGraph, Plan, Assignment, ScheduleForm], Iterator[Action]]

_SEND_OF = {
    ActionKind.FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.BACKWARD: ActionKind.SEND_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.SEND_BACKWARD,
}
_new = tuple.__new__
"""Makes named tuples of their fields five times as fast as their constructors: schedules have messages by the ten thousand."""
_RECEIVE_OF = {
    ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_BACKWARD,
}


def dependencies(
    action: Action,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    *,
    lowered: bool = False,
    form: ScheduleForm = PLAIN,
) -> tuple[Action, ...]:
    """Return the actions that must be complete before `action` may run.

    A forward needs the forward of the stage before it; at a unit's first stage, the last-stage forwards of every upstream
    microbatch that routes to it. A backward needs its own forward and the backward of the stage after it; at a unit's last
    stage, the first-stage backwards of every downstream microbatch that it routes to. Reducing a stage's gradients needs all
    its backwards on that replica; where that is done by layer, the first part begins with the last microbatch's backward: it
    needs all others, and what that backward needs.

    `form` says where the schedule cuts backwards. In a split backward the input gradient takes the backward's place, and the
    weight gradient needs it. Where a microbatch's backward is cut into sample subsets, a subset's backward needs the same subset
    at the stage after it; at the last stage, the backward of the one downstream microbatch that the subset routes to.

    In the lowered dialect (`lowered=True`) a dependency between different rank groups is carried by a message: the producer's
    send, then the consumer's receive, then the consumer. The sends' and receives' own dependencies are the same in both.

    `action` must be one of `expected_actions`; the result is deterministic, and its cost is linear in its length.
    """
    needed = _RULES[action.kind](action, graph, plan, assignment, form)
    if not lowered:
        return tuple(needed)
    return tuple(message(producer, action)[1] if needs_message(producer, action, plan) else producer for producer in needed)


def needs_message(producer: Action, consumer: Action, plan: Plan) -> bool:
    """Whether what `producer` computes must travel to another rank group before `consumer` can use it."""
    if producer.kind not in _SEND_OF or consumer.kind not in _SEND_OF or producer[1:4] == consumer[1:4]:
        return False
    return must_travel(producer.place, consumer.place, plan)


def must_travel(source: Place, target: Place, plan: Plan) -> bool:
    """Whether ranks at `target` lack what those at `source` compute: they are others, or hold other tokens of a microbatch.

    The latter where one of two units on the same ranks spreads tokens over context parallel ranks.
    """
    if plan.virtual_stage(*source[:3]).ranks != plan.virtual_stage(*target[:3]).ranks:
        return True
    sizes = plan.units[source.unit].context_parallel_size, plan.units[target.unit].context_parallel_size
    return source.unit != target.unit and sizes != (1, 1)


def message(producer: Action, consumer: Action) -> tuple[Action, Action]:
    """Return the send at the producer's place and the receive at the consumer's place that carry this dependency."""
    kind, unit, replica, stage, microbatch, _, part = producer
    other_kind, other_unit, other_replica, other_stage, other_microbatch, _, _ = consumer
    # Between units a subset is named by the microbatch at the other end, so only stages of one unit need to say which.
    if unit != other_unit:
        part = -1
    source = _new(Place, (unit, replica, stage, microbatch))
    target = _new(Place, (other_unit, other_replica, other_stage, other_microbatch))
    return (
        _new(Action, (_SEND_OF[kind], unit, replica, stage, microbatch, target, part)),
        _new(Action, (_RECEIVE_OF[other_kind], other_unit, other_replica, other_stage, other_microbatch, source, part)),
    )


def _forward_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> Iterator[Action]:
    if form.gathers_parameters and _is_trained(action, graph, plan):
        yield Action(ActionKind.GATHER_PARAMETERS, *action.place[:3])
    if action.stage > 0:
        yield action._replace(stage=action.stage - 1)
        return
    own = MicrobatchPlace(action.unit, action.replica, action.microbatch)
    for route in assignment.routes(graph).to_target.get(own, ()):
        source = route.source
        last_stage = plan.units[source.unit].num_virtual_stages - 1
        yield Action(ActionKind.FORWARD, source.unit, source.replica, last_stage, source.microbatch)


def _is_trained(action: Action, graph: ModelGraph, plan: Plan) -> bool:
    return stage_backward_need(graph, plan, action.unit, action.replica, action.stage).trains_weights


def _gather_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> Iterator[Action]:
    yield from ()


def _backward_needs(
    action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm
) -> Iterator[Action]:
    # What lies downstream of a stage that has a backward always has one, too: the gradient comes through it.
    yield Action(ActionKind.FORWARD, *action.place)
    if action.stage < plan.units[action.unit].num_virtual_stages - 1:
        after = action.place._replace(stage=action.stage + 1)
        yield Action(form.gradient_kind(after), *after, part=action.part)
        return
    for target in _targets_of(action, graph, assignment):
        first = Place(target.unit, target.replica, 0, target.microbatch)
        yield from (Action(form.gradient_kind(first), *first, part=part) for part in form.parts(target))


def _targets_of(action: Action, graph: ModelGraph, assignment: Assignment) -> Iterator[MicrobatchPlace]:
    own = MicrobatchPlace(action.unit, action.replica, action.microbatch)
    targets = [route.target for route in assignment.routes(graph).from_source.get(own, ())]
    if action.part < 0:
        yield from targets
        return
    part = parts_of(own, graph, assignment)[action.part]
    places = assignment.routes(graph).from_source[own]
    yield next(route.target for route in places if route.atoms[0] in part)


def _weight_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> Iterator[Action]:
    yield action._replace(kind=ActionKind.INPUT_GRADIENT)


def _reduce_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> Iterator[Action]:
    if action.part == 1:
        yield action._replace(part=0)
    last_microbatch = assignment.num_microbatches(action.unit, action.replica) - 1
    for microbatch in range(last_microbatch + 1):
        place = action.place._replace(microbatch=microbatch)
        parts = form.parts(MicrobatchPlace(action.unit, action.replica, microbatch))
        if action.part == 0 and microbatch == last_microbatch:
            last = Action(form.gradient_kind(place), *place, part=parts[-1])
            yield from _backward_needs(last, graph, plan, assignment, form)
            parts = parts[:-1]
        for part in parts:
            yield Action(form.last_kind(place), *place, part=part)


def _send_forward_needs(
    action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm
) -> Iterator[Action]:
    yield Action(ActionKind.FORWARD, *action.place)


def _send_backward_needs(
    action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm
) -> Iterator[Action]:
    yield Action(form.gradient_kind(action.place), *action.place, part=action.part)


def _receive_needs(kind: ActionKind) -> _Rule:
    def needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, form: ScheduleForm) -> Iterator[Action]:
        assert action.peer is not None, f"{action} has no peer"
        yield Action(kind, *action.peer, peer=action.place, part=action.part)

    return needs


_RULES: Mapping[ActionKind, _Rule] = {
    ActionKind.FORWARD: _forward_needs,
    ActionKind.BACKWARD: _backward_needs,
    ActionKind.INPUT_GRADIENT: _backward_needs,
    ActionKind.WEIGHT_GRADIENT: _weight_needs,
    ActionKind.SEND_FORWARD: _send_forward_needs,
    ActionKind.SEND_BACKWARD: _send_backward_needs,
    ActionKind.RECEIVE_FORWARD: _receive_needs(ActionKind.SEND_FORWARD),
    ActionKind.RECEIVE_BACKWARD: _receive_needs(ActionKind.SEND_BACKWARD),
    ActionKind.GATHER_PARAMETERS: _gather_needs,
    ActionKind.REDUCE_GRADIENTS: _reduce_needs,
}
