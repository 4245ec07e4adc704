"""The one dependency rule: the actions that each action of a step needs before it may run."""

from collections.abc import Callable, Iterator, Mapping

from multimodal.values.action import Action, ActionKind, Coverage, Place, SegmentRange
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

_SEND_OF = {
    ActionKind.FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.BACKWARD: ActionKind.SEND_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.SEND_BACKWARD,
}
_RECEIVE_OF = {
    ActionKind.FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.BACKWARD: ActionKind.RECEIVE_BACKWARD,
    ActionKind.INPUT_GRADIENT: ActionKind.RECEIVE_BACKWARD,
}
SENT_KINDS = frozenset(_SEND_OF)
"""Computations whose results other stages need."""
_new = tuple.__new__
"""Makes named tuples five times as fast as their constructors do: schedules have tens of thousands of actions."""


def dependencies(action: Action, shape: StepShape, *, lowered: bool = False) -> tuple[Action, ...]:
    """Return the actions that must be complete before `action` may run.

    A forward needs the forward of the stage before it; at a unit's first stage, the last-stage forwards of every upstream
    microbatch that routes to it. A backward needs its own forward and the backward of the stage after it; at a unit's last
    stage, the first-stage backwards of every downstream microbatch that it routes to. Reducing a stage's gradients needs all
    its backwards on that replica; where that is done by layer, all pieces but the last begin with the last microbatch's
    backward: they need all others, and what that backward needs. A piece needs the one before it.

    In a split backward the input gradient takes the backward's place, and the weight gradient needs it. Where a microbatch's
    backward is cut into sample subsets, a subset's backward needs the same subset at the stage after it; at the last stage, the
    backward of the one downstream microbatch that the subset routes to.

    Where a place is cut into segments, a forward's first range has the needs of a whole forward, and every other range needs the
    range before it; an action that needs the forward needs its last range. Its backward runs from the last segments to the first:
    the first range to run needs the forward's last range and the gradient from downstream, every other one the range before it.
    An action that needs the backward needs the last range to run, which yields the input gradient.

    In the lowered dialect (`lowered=True`) a dependency between different rank groups is carried by a message: the producer's
    send, then the consumer's receive, then the consumer. The sends' and receives' own dependencies are the same in both.

    `action` must be one of `StepWork.actions`; the result is deterministic, its cost linear in its length.
    """
    needed = _RULES[action.kind](action, shape)
    if not lowered:
        return tuple(needed)
    return tuple(message(producer, action)[1] if needs_message(producer, action, shape.plan) else producer for producer in needed)


def needs_message(producer: Action, consumer: Action, plan: Plan) -> bool:
    """Return True if the result of `producer` must travel to another rank group before `consumer` can use it."""
    if producer.kind not in _SEND_OF or consumer.kind not in _SEND_OF or producer[1:4] == consumer[1:4]:
        return False
    return must_travel(producer.place, consumer.place, plan)


def must_travel(source: Place, target: Place, plan: Plan) -> bool:
    """Return True if ranks at `target` lack results of ranks at `source`: they are other ranks, or hold other tokens.

    They hold other tokens if one of two units on the same ranks spreads tokens over context parallel ranks.
    """
    if plan.virtual_stage(*source[:3]).ranks != plan.virtual_stage(*target[:3]).ranks:
        return True
    sizes = plan.units[source.unit].context_parallel_size, plan.units[target.unit].context_parallel_size
    return source.unit != target.unit and sizes != (1, 1)


def message(producer: Action, consumer: Action) -> tuple[Action, Action]:
    """Return the send at the producer's place and the receive at the consumer's place that carry this dependency."""
    kind, unit, replica, stage, microbatch, _, covers = producer
    other_kind, other_unit, other_replica, other_stage, other_microbatch, _, _ = consumer
    # Between units a subset is named by the microbatch at the other end, so only stages of one unit need to say which. Of ranges
    # of segments, one alone sends.
    if unit != other_unit or isinstance(covers, SegmentRange):
        covers = None
    source = _new(Place, (unit, replica, stage, microbatch))
    target = _new(Place, (other_unit, other_replica, other_stage, other_microbatch))
    return (
        _new(Action, (_SEND_OF[kind], unit, replica, stage, microbatch, target, covers)),
        _new(Action, (_RECEIVE_OF[other_kind], other_unit, other_replica, other_stage, other_microbatch, source, covers)),
    )


def _microbatch(action: Action) -> MicrobatchPlace:
    return MicrobatchPlace(action.unit, action.replica, action.microbatch)


def _last_forward(place: Place, shape: StepShape) -> Action:
    """Return the forward that completes the output of a place."""
    return Action(ActionKind.FORWARD, *place, covers=shape.cuts.forwards(place)[-1])


def _input_gradients(place: Place, shape: StepShape) -> Iterator[Action]:
    """Yield the backwards that yield a place's input gradient: all sample subsets, or the last range of segments."""
    kind = shape.cuts.gradient_kind(place)
    return (Action(kind, *place, covers=covers) for covers in shape.cuts.gradients(place))


def _range_before(action: Action, ranges: tuple[Coverage, ...]) -> Action | None:
    """Return the range of segments that runs before this one; None if it runs first, or if the action covers no segments."""
    if not isinstance(action.covers, SegmentRange) or action.covers == ranges[0]:
        return None
    return action._replace(covers=ranges[ranges.index(action.covers) - 1])


def _forward_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    if before := _range_before(action, shape.cuts.forwards(action.place)):
        yield before
        return
    if shape.cuts.gathers_parameters and shape.backward_need(*action[1:4]).trains_weights:
        yield Action(ActionKind.GATHER_PARAMETERS, *action[1:4])
    if action.stage > 0:
        yield _last_forward(action.place._replace(stage=action.stage - 1), shape)
        return
    for source in shape.routes.sources_of.get(_microbatch(action), ()):
        last_stage = shape.plan.units[source.unit].num_stages_of(source.replica) - 1
        yield _last_forward(Place(source.unit, source.replica, last_stage, source.microbatch), shape)


def _gather_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    yield from ()


def _backward_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    if before := _range_before(action, shape.cuts.backwards(action.place)):
        yield before
        return
    # If a stage has a backward, so have all stages downstream of it: the gradient comes through them.
    yield _last_forward(action.place, shape)
    if action.stage < shape.plan.units[action.unit].num_stages_of(action.replica) - 1:
        after = _input_gradients(action.place._replace(stage=action.stage + 1), shape)
        yield from (each for each in after if action.subset in (-1, each.subset))
        return
    for target in _targets_of(action, shape):
        yield from _input_gradients(Place(target.unit, target.replica, 0, target.microbatch), shape)


def _targets_of(action: Action, shape: StepShape) -> tuple[MicrobatchPlace, ...]:
    if action.subset < 0:
        return shape.routes.targets_of.get(_microbatch(action), ())
    return shape.consumers(_microbatch(action))[action.subset : action.subset + 1]


def _weight_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    yield action._replace(kind=ActionKind.INPUT_GRADIENT)


def _reduce_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    pieces, is_early = shape.reductions(*action[1:4]), shape.begins_early(action)
    if action.covers != pieces[0]:
        yield action._replace(covers=pieces[pieces.index(action.covers) - 1])
    last_microbatch = shape.num_microbatches(action.unit, action.replica) - 1
    for microbatch in range(last_microbatch + 1):
        place = action.place._replace(microbatch=microbatch)
        completing = shape.cuts.gradients(place)
        if is_early and microbatch == last_microbatch:
            first = shape.cuts.backwards(place)[0] if place in shape.cuts.segments else completing[-1]
            yield from _backward_needs(Action(shape.cuts.gradient_kind(place), *place, covers=first), shape)
            completing = completing[:-1]
        for covers in completing:
            yield Action(shape.cuts.last_kind(place), *place, covers=covers)


def _send_forward_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    yield _last_forward(action.place, shape)


def _send_backward_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    yield from (each for each in _input_gradients(action.place, shape) if action.subset in (-1, each.subset))


def _receive_needs(kind: ActionKind) -> Callable[[Action, StepShape], Iterator[Action]]:
    def needs(action: Action, shape: StepShape) -> Iterator[Action]:
        assert action.peer is not None, f"{action} has no peer"
        yield Action(kind, *action.peer, peer=action.place, covers=action.covers)

    return needs


_RULES: Mapping[ActionKind, Callable[[Action, StepShape], Iterator[Action]]] = {
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
