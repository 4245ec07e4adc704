"""The dependency rule in words, action by action: what the arrays of `StepWork` are held against."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from multimodal.values.action import Action, ActionKind, Coverage, Place, SegmentRange
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import SEND_OF, message


def dependencies(action: Action, shape: StepShape, *, lowered: bool = False) -> tuple[Action, ...]:
    """Return the actions that must be complete before `action` may run, in the order that `piece_needs` states."""
    needed = _RULES[action.kind](action, shape)
    if not lowered:
        return tuple(needed)
    return tuple(message(producer, action)[1] if needs_message(producer, action, shape.plan) else producer for producer in needed)


def needs_message(producer: Action, consumer: Action, plan: Plan) -> bool:
    """Return True if the result of `producer` must travel to another rank group before `consumer` can use it."""
    if producer.kind not in SEND_OF or consumer.kind not in SEND_OF or producer[1:4] == consumer[1:4]:
        return False
    if plan.virtual_stage(*producer[1:4]).ranks != plan.virtual_stage(*consumer[1:4]).ranks:
        return True
    sizes = plan.units[producer.unit].context_parallel_size, plan.units[consumer.unit].context_parallel_size
    return producer.unit != consumer.unit and sizes != (1, 1)


def _last_forward(place: Place, shape: StepShape) -> Action:
    """Return the forward that completes the output of a place."""
    return Action(ActionKind.FORWARD, *place, covers=shape.cuts.forwards(place)[-1])


def _input_gradients(place: Place, shape: StepShape) -> Iterator[Action]:
    """Yield the backwards that yield a place's input gradient: all sample subsets, or the last range of segments."""
    kind = ActionKind.INPUT_GRADIENT if place in shape.cuts.split else ActionKind.BACKWARD
    return (Action(kind, *place, covers=covers) for covers in _completing(place, shape))


def _completing(place: Place, shape: StepShape) -> tuple[Coverage, ...]:
    """Return the coverage of the backwards that complete a place's gradients: every sample subset, or the last range."""
    backwards = shape.cuts.backwards(place)
    return backwards[-1:] if place in shape.cuts.segments else backwards


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
    for source in shape.routes.sources_of.get(action.microbatch_place, ()):
        last_stage = shape.plan.units[source.unit].num_stages_of(source.replica) - 1
        yield _last_forward(Place(source.unit, source.replica, last_stage, source.microbatch), shape)


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
        return shape.routes.targets_of.get(action.microbatch_place, ())
    return shape.consumers(action.microbatch_place)[action.subset : action.subset + 1]


def _reduce_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    pieces, is_early = shape.reductions(*action[1:4]), shape.begins_early(action)
    if action.covers != pieces[0]:
        yield action._replace(covers=pieces[pieces.index(action.covers) - 1])
    last_microbatch = shape.num_microbatches(action.unit, action.replica) - 1
    for microbatch in range(last_microbatch + 1):
        place = action.place._replace(microbatch=microbatch)
        completing, is_split = _completing(place, shape), place in shape.cuts.split
        if is_early and microbatch == last_microbatch:
            first = shape.cuts.backwards(place)[0] if place in shape.cuts.segments else completing[-1]
            yield from _backward_needs(Action(ActionKind.BACKWARD, *place, covers=first), shape)
            completing = completing[:-1]
        for covers in completing:
            yield Action(ActionKind.WEIGHT_GRADIENT if is_split else ActionKind.BACKWARD, *place, covers=covers)


def _send_backward_needs(action: Action, shape: StepShape) -> Iterator[Action]:
    yield from (each for each in _input_gradients(action.place, shape) if action.subset in (-1, each.subset))


def _receive_needs(kind: ActionKind) -> Callable[[Action, StepShape], Iterator[Action]]:
    def needs(action: Action, shape: StepShape) -> Iterator[Action]:
        assert action.peer is not None, f"{action} has no peer"
        yield Action(kind, *action.peer, peer=action.place, covers=action.covers)

    return needs


_RULES: Mapping[ActionKind, Callable[[Action, StepShape], Iterable[Action]]] = {
    ActionKind.FORWARD: _forward_needs,
    ActionKind.BACKWARD: _backward_needs,
    ActionKind.INPUT_GRADIENT: _backward_needs,
    ActionKind.WEIGHT_GRADIENT: lambda action, shape: [action._replace(kind=ActionKind.INPUT_GRADIENT)],
    ActionKind.SEND_FORWARD: lambda action, shape: [_last_forward(action.place, shape)],
    ActionKind.SEND_BACKWARD: _send_backward_needs,
    ActionKind.RECEIVE_FORWARD: _receive_needs(ActionKind.SEND_FORWARD),
    ActionKind.RECEIVE_BACKWARD: _receive_needs(ActionKind.SEND_BACKWARD),
    ActionKind.GATHER_PARAMETERS: lambda action, shape: [],
    ActionKind.REDUCE_GRADIENTS: _reduce_needs,
}
