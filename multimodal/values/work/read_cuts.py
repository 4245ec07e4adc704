"""Reads the cuts of a step from the actions of its schedule."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from multimodal.values.action import (
    ACTION_TABLE,
    Action,
    ActionKind,
    LayerRange,
    Place,
    Resource,
    SampleSubset,
    SegmentRange,
    action_to_text,
)
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import UNCUT, Cuts, SegmentCut, StageKey
from multimodal.values.parts.lane import Lane, slot_error
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

_Entry = tuple[int, int, Action]
"""Lane, position in the lane, and action."""


def read_cuts(actions: Iterable[Action], plan: Plan) -> Cuts:
    """Read the cuts of a step from the actions of its schedule, lane after lane. O(actions)."""
    split: set[Place] = set()
    num_subsets: dict[MicrobatchPlace, int] = {}
    gathers, by_layer = False, set()
    ranges: dict[Place, list[tuple[ActionKind, SegmentRange]]] = defaultdict(list)
    unlike = _UnlikeReductions(plan)
    for action in actions:
        kind = action.kind
        if action.unit in unlike.units:
            unlike.note(action)
        if kind is ActionKind.INPUT_GRADIENT or kind is ActionKind.WEIGHT_GRADIENT:
            split.add(action.place)
        elif kind is ActionKind.GATHER_PARAMETERS:
            gathers = True
        if isinstance(action.covers, SampleSubset):
            microbatch = action.microbatch_place
            num_subsets[microbatch] = max(num_subsets.get(microbatch, 0), action.covers.index + 1)
        elif isinstance(action.covers, SegmentRange):
            ranges[action.place].append((kind, action.covers))
        elif isinstance(action.covers, LayerRange) and action.unit not in unlike.units:
            by_layer.add((action.unit, action.stage))
    segments = {place: _segment_cut(pieces) for place, pieces in ranges.items()}
    cuts = Cuts(frozenset(split), num_subsets, gathers, frozenset(by_layer | unlike.by_layer), segments)
    return UNCUT if cuts == UNCUT else cuts


class _UnlikeReductions:
    """The units with unlike replicas, and those of them that reduce by layer.

    Their reductions cover layers in either case: whole ranges that the same ranks hold, or parts of such ranges (by layer). If
    all ranges are single layers, both look alike: then a unit reduces by layer if its stages compute after their first
    reductions.
    """

    def __init__(self, plan: Plan) -> None:
        self.units = {name: unit for name, unit in plan.units.items() if unit.is_unlike}
        self._parts: dict[str, set[bool]] = {name: set() for name in self.units}
        """Unit -> whether its reductions cover parts of ranges, as far as they show it."""
        self._early: set[str] = set()
        self._reducing: set[StageKey] = set()
        self._seen: set[Action] = set()

    def note(self, action: Action) -> None:
        """Note an action of such a unit; only in the first lane that has it, if several lanes execute the stage."""
        if action in self._seen:
            return
        self._seen.add(action)
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            self._reducing.add(action[1:4])
            self._parts[action.unit].update(self._covers_part(action))
        elif action[1:4] in self._reducing and ACTION_TABLE[action.kind].resource is Resource.COMPUTE:
            self._early.add(action.unit)

    @property
    def by_layer(self) -> set[tuple[str, int]]:
        """(unit, stage) of all stages of the units that reduce by layer."""
        found = (name for name, parts in self._parts.items() if (parts == {True} if parts else name in self._early))
        return {(name, stage) for name in found for stage in range(self.units[name].num_virtual_stages)}

    def _covers_part(self, reduction: Action) -> Iterator[bool]:
        """Yield True or False as the reduction covers a part of a range that the same ranks hold; nothing if that is unclear."""
        unit, covers = self.units[reduction.unit], reduction.covers
        stages = unit.replicas[reduction.replica].virtual_stages if reduction.replica < len(unit.replicas) else ()
        if isinstance(covers, LayerRange) and reduction.stage < len(stages):
            start = stages[reduction.stage].layers.start
            layers = range(start + covers.first, start + covers.end)
            yield from (layers != each for each in unit.shared_ranges if len(each) > 1 and layers in (each, each[:1], each[1:]))


def _segment_cut(ranges: Sequence[tuple[ActionKind, SegmentRange]]) -> SegmentCut:
    """Return the cut of one place; `check_coverages` has found that its ranges follow each other."""
    firsts: dict[ActionKind, set[int]] = {ActionKind.FORWARD: set(), ActionKind.BACKWARD: set()}
    for kind, covered in ranges:
        firsts[kind].add(covered.first)
    forward, backward = (tuple(sorted(each - {0})) for each in firsts.values())
    return SegmentCut(max(covered.end for _, covered in ranges), forward, backward)


def check_coverages(lanes: Sequence[Lane], shape: StepShape) -> None:
    """Check that sample subsets and ranges of segments in a schedule add up to whole forwards and backwards.

    Raises ScheduleError. The number of segments of a stage is not checked here.
    """
    slots = ((index, *slot) for index, lane in enumerate(lanes) for slot in enumerate(lane.actions))
    entries = [(index, position, action) for index, position, action in slots if action.covers is not None]
    if entries:
        _check_subsets([entry for entry in entries if isinstance(entry[2].covers, SampleSubset)], lanes, shape)
        _check_segments([entry for entry in entries if isinstance(entry[2].covers, SegmentRange)], lanes)


def _check_segments(entries: Sequence[_Entry], lanes: Sequence[Lane]) -> None:
    """Check that the ranges of every place follow each other without gap or overlap, and end alike in forward and backward."""
    of_place: dict[tuple[ActionKind, Place], dict[SegmentRange, _Entry]] = defaultdict(dict)
    ends: dict[Place, int] = defaultdict(int)
    for entry in entries:
        lane, position, action = entry
        assert isinstance(action.covers, SegmentRange)
        if action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD) or action.covers.first >= action.covers.end:
            problem = "only forwards and backwards run in ranges of segments, each of at least one; let it cover the whole stage"
            raise slot_error(action, problem, lanes, {lane: position})
        of_place[action.kind, action.place].setdefault(action.covers, entry)
        ends[action.place] = max(ends[action.place], action.covers.end)
    for (_, place), ranges in of_place.items():
        end = 0
        for covered in sorted(ranges, key=lambda each: (each.first, each.end)):
            if covered.first != end:
                raise _range_error(ranges[covered], end, covered.first, lanes)
            end = covered.end
        if end != ends[place]:
            raise _range_error(ranges[covered], end, ends[place], lanes)


def _range_error(entry: _Entry, end: int, wanted: int, lanes: Sequence[Lane]) -> ScheduleError:
    """Return an error about a range next to which segments `end` to `wanted` - 1 are missing, or run twice (if end is larger)."""
    lane, position, action = entry
    first, last = sorted((end, wanted))
    text = action_to_text(action._replace(covers=SegmentRange(first, last)))
    problem = f"missing range: nothing runs {text}; add it, or cut the place otherwise"
    if wanted < end:
        problem = f"ranges overlap: {text} runs in it and in the range before; let every segment run once"
    return slot_error(action, problem, lanes, {lane: position})


def _check_subsets(entries: Sequence[_Entry], lanes: Sequence[Lane], shape: StepShape) -> None:
    """Check that the sample subsets are exactly those that the shape's routes make, and that the unit is an encoder."""
    found = read_cuts((action for _, _, action in entries), shape.plan).num_subsets
    encoders = {unit.name for unit in shape.graph.encoders if shape.graph.gives_items_once(unit.name)}
    for index, position, action in entries:
        microbatch = action.microbatch_place
        is_known = action.unit in encoders and microbatch in shape.microbatch_set
        count = len(shape.consumers(microbatch)) if is_known else 0
        if action.subset >= count:
            problem = (
                f"unknown subset: its microbatch has {count} sample subsets (one per consumer, of encoders that feed one unit); "
                "number them from 0, or leave the subset out"
            )
            raise slot_error(action, problem, lanes, {index: position})
        if found[microbatch] < count:
            problem = (
                f"missing subset: its microbatch has {count} sample subsets (one per consumer) but the schedule runs "
                f"the backwards of {found[microbatch]}; add the others"
            )
            raise slot_error(action, problem, lanes, {index: position})
