"""The one dependency function: what must have happened before an action may run."""

from collections.abc import Callable, Iterator, Mapping

from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Place

_Rule = Callable[[Action, ModelGraph, Plan, Assignment], Iterator[Action]]

_SEND_OF = {ActionKind.FORWARD: ActionKind.SEND_FORWARD, ActionKind.BACKWARD: ActionKind.SEND_BACKWARD}
_RECEIVE_OF = {ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD, ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD}


def dependencies(
    action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment, *, lowered: bool = False
) -> tuple[Action, ...]:
    """Return the actions that must be complete before `action` may run.

    A forward needs the forward of the stage before it; at a unit's first stage, the last-stage forwards of every upstream
    microbatch that routes to it. A backward needs its own forward and the backward of the stage after it; at a unit's last
    stage, the first-stage backwards of every downstream microbatch that it routes to. Reducing a stage's gradients needs all
    its backwards on that replica.

    In the lowered dialect (`lowered=True`) a dependency between different rank groups is carried by a message: the producer's
    send, then the consumer's receive, then the consumer. The sends' and receives' own dependencies are the same in both.

    `action` must be one of `expected_actions`; the result is deterministic, and its cost is linear in its length.
    """
    needed = _RULES[action.kind](action, graph, plan, assignment)
    if not lowered:
        return tuple(needed)
    return tuple(message(producer, action)[1] if needs_message(producer, action, plan) else producer for producer in needed)


def needs_message(producer: Action, consumer: Action, plan: Plan) -> bool:
    """Whether what `producer` computes must travel to another rank group before `consumer` can use it."""
    if producer.kind not in _SEND_OF or consumer.kind not in _SEND_OF or producer[1:4] == consumer[1:4]:
        return False
    return plan.virtual_stage(*producer[1:4]).ranks != plan.virtual_stage(*consumer[1:4]).ranks


def message(producer: Action, consumer: Action) -> tuple[Action, Action]:
    """Return the send at the producer's place and the receive at the consumer's place that carry this dependency."""
    send = Action(_SEND_OF[producer.kind], *producer.place, peer=consumer.place)
    return send, Action(_RECEIVE_OF[producer.kind], *consumer.place, peer=producer.place)


def _forward_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Iterator[Action]:
    if action.stage > 0:
        yield action._replace(stage=action.stage - 1)
        return
    own = MicrobatchPlace(action.unit, action.replica, action.microbatch)
    for route in assignment.routes(graph).to_target.get(own, ()):
        source = route.source
        last_stage = plan.units[source.unit].num_virtual_stages - 1
        yield Action(ActionKind.FORWARD, source.unit, source.replica, last_stage, source.microbatch)


def _backward_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Iterator[Action]:
    # What lies downstream of a stage that has a backward always has one, too: the gradient comes through it.
    yield action._replace(kind=ActionKind.FORWARD)
    if action.stage < plan.units[action.unit].num_virtual_stages - 1:
        yield action._replace(stage=action.stage + 1)
        return
    own = MicrobatchPlace(action.unit, action.replica, action.microbatch)
    for route in assignment.routes(graph).from_source.get(own, ()):
        target = route.target
        yield Action(ActionKind.BACKWARD, target.unit, target.replica, 0, target.microbatch)


def _reduce_needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Iterator[Action]:
    for microbatch in range(assignment.num_microbatches(action.unit, action.replica)):
        yield Action(ActionKind.BACKWARD, action.unit, action.replica, action.stage, microbatch)


def _send_needs(kind: ActionKind) -> _Rule:
    def needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Iterator[Action]:
        yield Action(kind, *action.place)

    return needs


def _receive_needs(kind: ActionKind) -> _Rule:
    def needs(action: Action, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Iterator[Action]:
        yield Action(kind, *_peer(action), peer=action.place)

    return needs


def _peer(action: Action) -> Place:
    assert action.peer is not None, f"{action} has no peer"
    return action.peer


_RULES: Mapping[ActionKind, _Rule] = {
    ActionKind.FORWARD: _forward_needs,
    ActionKind.BACKWARD: _backward_needs,
    ActionKind.SEND_FORWARD: _send_needs(ActionKind.FORWARD),
    ActionKind.SEND_BACKWARD: _send_needs(ActionKind.BACKWARD),
    ActionKind.RECEIVE_FORWARD: _receive_needs(ActionKind.SEND_FORWARD),
    ActionKind.RECEIVE_BACKWARD: _receive_needs(ActionKind.SEND_BACKWARD),
    ActionKind.REDUCE_GRADIENTS: _reduce_needs,
}
