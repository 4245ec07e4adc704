"""Random rewrites of schedules, as passes: what the executor must get right beyond what the builders emit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Resource, SampleSubset
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.schedule import Schedule, lane_of


@dataclass(frozen=True)
class SplitStages:
    """Split the backwards of random stages; weight gradients run right after, or at the end of the lane."""

    seed: int

    def __call__(self, schedule: Schedule) -> Schedule:
        def rewritten(action: Action) -> list[Action]:
            if action.kind is not ActionKind.BACKWARD or not self._draw("split", *action.place[:3]):
                return [action]
            need = schedule.step.backward_need(*action.place[:3])
            kinds = (ActionKind.INPUT_GRADIENT, *((ActionKind.WEIGHT_GRADIENT,) if need.trains_weights else ()))
            return [action._replace(kind=kind) for kind in kinds]

        split = _map_actions(schedule, rewritten)
        return split.with_lanes(lane_of(lane.ranks, self._delay(lane.actions)) for lane in split.lanes)

    def _delay(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Move weight gradients to right before the reduction of their stage."""
        delayed = [action for action in actions if self._is_delayed(action)]
        found: list[Action] = []
        for action in actions:
            if action.kind is ActionKind.REDUCE_GRADIENTS:
                found += [each for each in delayed if each.place[:3] == action.place[:3]]
            if not self._is_delayed(action):
                found.append(action)
        return tuple(found)

    def _is_delayed(self, action: Action) -> bool:
        return action.kind is ActionKind.WEIGHT_GRADIENT and self._draw("delay", *action.place, action.subset)

    def _draw(self, *key: object) -> bool:
        return _draw(self.seed, *key)


@dataclass(frozen=True)
class CutMicrobatches:
    """Cut the backwards of random encoder microbatches into sample subsets, which run one after another in any order."""

    seed: int

    def __call__(self, schedule: Schedule) -> Schedule:
        encoders = {unit.name for unit in schedule.step.graph.encoders}

        def rewritten(action: Action) -> list[Action]:
            place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
            is_backward = action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            if not is_backward or action.unit not in encoders or not _draw(self.seed, *place):
                return [action]
            subsets = [SampleSubset(index) for index in range(len(schedule.step.consumers(place)))]
            random.Random(f"{self.seed} {place} {action.stage}").shuffle(subsets)
            return [action._replace(covers=subset) for subset in subsets]

        return _map_actions(schedule, rewritten)


@dataclass(frozen=True)
class FillWithWeightGradients:
    """Make fillers of random weight gradients that stand right before another computation, in lanes of their own."""

    seed: int

    def __call__(self, schedule: Schedule) -> Schedule:
        lanes = []
        for lane in schedule.lanes:
            is_alone = all(len(schedule.step.lanes_of(*action.place[:3])) == 1 for action in lane.actions)
            fillers = {index for index in range(len(lane.actions) - 1) if is_alone and self._fills(lane.actions, index)}
            lanes.append(lane_of(lane.ranks, lane.actions, fillers))
        return schedule.with_lanes(lanes)

    def _fills(self, actions: Sequence[Action], index: int) -> bool:
        """Only where computations alone stand between it and the next one that is no weight gradient."""
        if actions[index].kind is not ActionKind.WEIGHT_GRADIENT or not _draw(self.seed, *actions[index].place):
            return False
        after = next((action for action in actions[index + 1 :] if action.kind is not ActionKind.WEIGHT_GRADIENT), None)
        return after is not None and ACTION_TABLE[after.kind].resource is Resource.COMPUTE


def _map_actions(schedule: Schedule, rewritten: Callable[[Action], list[Action]]) -> Schedule:
    return schedule.with_lanes(
        lane_of(lane.ranks, (new for action in lane.actions for new in rewritten(action))) for lane in schedule.lanes
    )


def _draw(seed: int, *key: object) -> bool:
    """A coin that falls alike in every lane and on every rank."""
    return random.Random(f"{seed} {key}").random() < 0.5
