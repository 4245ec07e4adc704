"""Reads the cuts of a step from the actions of its schedule."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from multimodal.values.action import Action, ActionKind, LayerRange, Place, Resource, SampleSubset, SegmentRange
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.parts.cuts import UNCUT, Cuts, SegmentCut, StageKey
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape


def read_cuts(actions: Iterable[Action], shape: StepShape) -> Cuts:
    """Read the cuts of a step from the actions of its schedule, lane after lane. O(actions).

    Actions that no cut makes (subsets that the routes do not, ranges of segments with gaps) are unknown to the shape cut so.
    """
    fed_once = {unit.name for unit in shape.graph.encoders if shape.graph.gives_items_once(unit.name)}
    # Most schedules have no sample subsets, and never ask for these.
    places_fed_once = cache(lambda: {each for each in shape.microbatches if each.unit in fed_once})
    split: set[Place] = set()
    num_subsets: dict[MicrobatchPlace, int] = {}
    gathers, by_layer = False, set()
    ranges: dict[Place, list[tuple[ActionKind, SegmentRange]]] = defaultdict(list)
    unlike = _UnlikeReductions(shape.plan)
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
            if microbatch not in num_subsets and microbatch in places_fed_once():
                num_subsets[microbatch] = len(shape.consumers(microbatch))
        elif isinstance(action.covers, SegmentRange):
            if kind in (ActionKind.FORWARD, ActionKind.BACKWARD) and action.covers.first < action.covers.end:
                ranges[action.place].append((kind, action.covers))
        elif isinstance(action.covers, LayerRange) and action.unit not in unlike.units:
            by_layer.add((action.unit, action.stage))
    segments = {place: _segment_cut(pieces) for place, pieces in ranges.items()}
    cuts = Cuts(frozenset(split), num_subsets, gathers, frozenset(by_layer | unlike.by_layer), segments)
    return UNCUT if cuts == UNCUT else cuts


class _UnlikeReductions:
    """The units with unlike replicas, and those of them that reduce by layer.

    Their reductions cover layers in either case: whole ranges that the same ranks hold, or parts of such ranges (by layer). If
    all ranges are single layers, both look alike: a unit reduces by layer if its stages compute after their first reductions.
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
        elif action[1:4] in self._reducing and action.kind.resource is Resource.COMPUTE:
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
    firsts: dict[ActionKind, set[int]] = {ActionKind.FORWARD: set(), ActionKind.BACKWARD: set()}
    for kind, covered in ranges:
        firsts[kind].add(covered.first)
    forward, backward = (tuple(sorted(each - {0})) for each in firsts.values())
    return SegmentCut(max(covered.end for _, covered in ranges), forward, backward)
