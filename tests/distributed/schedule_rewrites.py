"""Random rewrites of schedules, as passes: what the executor must get right beyond what the builders emit."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from multimodal.cost.layers.registry import count_segments
from multimodal.cost.pieces.tensor_parallel_waits import computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Place, Resource, SampleSubset, SegmentRange
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode, lane_of

_FORWARD, _BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
_NUM_CARRIERS = 3
"""Computations among which a piece of work finds its wait."""


@dataclass(frozen=True)
class Rewritten:
    """What other rewrites made of a schedule: slow ones, which every rank would have to make again."""

    lanes: tuple[Lane, ...]

    def __call__(self, schedule: Schedule) -> Schedule:
        return schedule.with_lanes(self.lanes)


@dataclass(frozen=True)
class SplitStages:
    """Split the backwards of random stages; weight gradients run right after, or at the end of the lane."""

    seed: int

    def __call__(self, schedule: Schedule) -> Schedule:
        def rewritten(action: Action) -> list[Action]:
            if action.kind is not ActionKind.BACKWARD or not self._draw("split", *action.place[:3]):
                return [action]
            need = schedule.shape.backward_need(*action.place[:3])
            kinds = (ActionKind.INPUT_GRADIENT, *((ActionKind.WEIGHT_GRADIENT,) if need.trains_weights else ()))
            return [action._replace(kind=kind) for kind in kinds]

        split = _map_actions(schedule, rewritten)
        return split.with_lanes(lane_of(lane.ranks, self._delay(lane.actions)) for lane in split.lanes)

    def _delay(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Move weight gradients to right before the first reduction of their stage."""
        delayed = [action for action in actions if self._is_delayed(action)]
        found: list[Action] = []
        for action in actions:
            if action.kind is ActionKind.REDUCE_GRADIENTS:
                found += [each for each in delayed if each.place[:3] == action.place[:3]]
                delayed = [each for each in delayed if each.place[:3] != action.place[:3]]
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
        graph = schedule.shape.graph
        encoders = {unit.name for unit in graph.encoders if graph.gives_items_once(unit.name)}

        def rewritten(action: Action) -> list[Action]:
            place = action.microbatch_place
            is_backward = action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            if not is_backward or action.unit not in encoders or not _draw(self.seed, *place):
                return [action]
            subsets = [SampleSubset(index) for index in range(len(schedule.shape.consumers(place)))]
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
            is_alone = all(len(schedule.shape.plan.lanes_of_stage(*action.place[:3])) == 1 for action in lane.actions)
            fills = (is_alone and self._fills(lane.actions, index) for index in range(len(lane.actions) - 1))
            modes = (*(SlotMode.FILLS_WAIT if each else SlotMode.IN_LINE for each in fills), SlotMode.IN_LINE)
            lanes.append(Lane(lane.ranks, tuple(map(Slot, lane.actions, modes))))
        return schedule.with_lanes(lanes)

    def _fills(self, actions: Sequence[Action], index: int) -> bool:
        """Only where computations alone stand between it and the next one that is no weight gradient."""
        if actions[index].kind is not ActionKind.WEIGHT_GRADIENT or not _draw(self.seed, *actions[index].place):
            return False
        after = next((action for action in actions[index + 1 :] if action.kind is not ActionKind.WEIGHT_GRADIENT), None)
        return after is not None and after.kind.resource is Resource.COMPUTE


@dataclass(frozen=True)
class RunInsideWaits:
    """Cut computations of encoders into random ranges of segments, and run ranges inside random computations that may carry
    them, in random waits: forwards earlier than they stood, backwards later."""

    seed: int
    options: RunOptions
    density: float = 1.0
    """The share of the bounds between segments at which a computation is cut."""

    def __call__(self, schedule: Schedule) -> Schedule:
        drawn = random.Random(self.seed)
        encoders = {unit.name for unit in schedule.shape.graph.encoders}
        schedule = _map_actions(schedule, lambda action: self._cut(schedule, action) if action.unit in encoders else [action])
        ranges: dict[tuple[ActionKind, Place], list[Action]] = defaultdict(list)
        for action in dict.fromkeys(slot.action for lane in schedule.lanes for slot in lane.slots):
            if action.unit in encoders and action.kind in (_FORWARD, _BACKWARD):
                ranges[action.kind, action.place].append(action)
        for pieces in drawn.sample(list(ranges.values()), len(ranges)):
            for count in (len(pieces), (len(pieces) + 1) // 2, 1):
                moved = self._moved(schedule, pieces[:count] if pieces[0].kind is _FORWARD else pieces[-count:], drawn)
                try:
                    validate_schedule(moved, options=self.options)
                except ScheduleError:
                    continue
                schedule = moved
                break
        return schedule

    def _cut(self, schedule: Schedule, action: Action) -> list[Action]:
        if action.kind not in (_FORWARD, _BACKWARD):
            return [action]
        layers = schedule.shape.plan.virtual_stage(*action.place[:3]).layers
        count = count_segments(schedule.shape.graph.unit(action.unit), layers)
        drawn = random.Random(f"{self.seed} {action}")
        bounds = [bound for bound in range(1, count) if drawn.random() < self.density]
        ranges = [action._replace(covers=SegmentRange(first, end)) for first, end in pairwise((0, *bounds, count))]
        return (ranges if action.kind is _FORWARD else ranges[::-1]) if bounds else [action]

    def _moved(self, schedule: Schedule, pieces: Sequence[Action], drawn: random.Random) -> Schedule:
        """Move pieces of one computation, which run one after another, into waits that come one after another."""
        lane = next(lane for lane in schedule.lanes if pieces[0] in lane.actions)
        start = lane.actions.index(pieces[0])
        in_line = [slot.action if slot.mode is SlotMode.IN_LINE else pieces[0] for slot in lane.slots]
        others = [
            [action for action in actions if action.unit != pieces[0].unit and self._count_waits(schedule, action)]
            for actions in (in_line[:start], in_line[start:])
        ]
        carriers = others[0][-_NUM_CARRIERS:] if pieces[0].kind is _FORWARD else others[1][:_NUM_CARRIERS]
        waits = [(carrier, wait) for carrier in carriers for wait in range(self._count_waits(schedule, carrier))]
        if not waits:
            return schedule
        chosen = sorted(drawn.choices(range(len(waits)), k=len(pieces)))
        for piece, index in zip(pieces, chosen, strict=True):
            schedule = schedule.with_lanes(_with_inside(lane, piece, *waits[index]) for lane in schedule.lanes)
        return schedule

    def _count_waits(self, schedule: Schedule, action: Action) -> int:
        step = schedule.shape
        if action.kind not in (_FORWARD, _BACKWARD) or action.covers or step.plan.units[action.unit].tensor_parallel_size == 1:
            return 0
        layers = StageLayers(step.graph, step.plan, vocab_size=0).in_order(action.place[:3])
        return len(computation_waits(action.kind, layers, options=self.options, unit=step.graph.unit(action.unit)))


def _with_inside(lane: Lane, action: Action, carrier: Action, wait: int) -> Lane:
    slots = [slot for slot in lane.slots if slot.action != action]
    position = next((index for index, slot in enumerate(slots) if slot.action == carrier), None)
    if len(slots) == len(lane.slots) or position is None:
        return lane
    while position and slots[position - 1].mode is SlotMode.INSIDE and slots[position - 1].wait > wait:
        position -= 1
    return Lane(lane.ranks, (*slots[:position], Slot(action, SlotMode.INSIDE, wait), *slots[position:]))


def _map_actions(schedule: Schedule, rewritten: Callable[[Action], list[Action]]) -> Schedule:
    return schedule.with_lanes(
        lane_of(lane.ranks, (new for action in lane.actions for new in rewritten(action))) for lane in schedule.lanes
    )


def _draw(seed: int, *key: object) -> bool:
    """A coin that falls alike in every lane and on every rank."""
    return random.Random(f"{seed} {key}").random() < 0.5
