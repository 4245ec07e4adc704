"""Strategies for schedules of every builder and pass, and for broken ones; and costs for the simulator."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from hypothesis import strategies as st

from multimodal.cost.cluster import TransferCost
from multimodal.cost.layers.registry import count_segments
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import ScheduleError
from multimodal.values.parts.cuts import SegmentCut
from multimodal.values.schedule import Lane, Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, built_cases, deal


@st.composite
def rewritten_schedules(draw: st.DrawFn) -> tuple[StepShape, Schedule]:
    """A random case and a compute-dialect schedule for it, of any builder, with any passes."""
    case, builder = draw(built_cases())
    passes = draw(st.lists(st.sampled_from(sorted(PASSES)), unique=True, max_size=3))
    schedule = BUILDERS[builder](case)
    for name in passes:
        schedule = PASSES[name](schedule)
    return case, schedule


@st.composite
def built_schedules(draw: st.DrawFn) -> tuple[StepShape, Schedule, bool]:
    """A random case, a schedule for it in either dialect, and whether it is lowered."""
    case, schedule = draw(rewritten_schedules())
    lowered = draw(st.booleans())
    if lowered:
        schedule = insert_communication(schedule)
    return case, schedule, lowered


@st.composite
def cut_schedules(draw: st.DrawFn) -> tuple[StepShape, Schedule]:
    """A random case and a compute-dialect schedule for it in which random forwards and backwards run in ranges of segments."""
    case, schedule = draw(rewritten_schedules())
    cuts = schedule.shape.cuts
    segments = {}
    for place in sorted({action.place for action in schedule.work.computed if action.microbatch >= 0}):
        is_cut = place in cuts.split or MicrobatchPlace(place.unit, place.replica, place.microbatch) in cuts.num_subsets
        if not is_cut and draw(st.booleans()):
            segments[place] = draw(segment_cuts(case, place))
    return case, cut_in_ranges(schedule, segments)


@st.composite
def segment_cuts(draw: st.DrawFn, case: StepShape, place: Place) -> SegmentCut:
    num_segments = count_segments(case.graph.unit(place.unit), case.plan.virtual_stage(*place[:3]).layers)
    forward, backward = (
        tuple(sorted(draw(st.sets(st.integers(1, num_segments - 1), max_size=4)))) if num_segments > 1 else () for _ in range(2)
    )
    return SegmentCut(num_segments, forward, backward if case.backward_need(*place[:3]).has_backward else ())


def cut_in_ranges(schedule: Schedule, segments: Mapping[Place, SegmentCut]) -> Schedule:
    """The schedule with the ranges of each cut computation right after each other, in its place."""

    def ranges(slot: Slot) -> list[Slot]:
        action = slot.action
        cut = segments.get(action.place)
        if cut is None or action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD):
            return [slot]
        covered = cut.forwards if action.kind is ActionKind.FORWARD else cut.backwards
        return [slot._replace(action=action._replace(covers=each)) for each in covered]

    return schedule.with_lanes(
        Lane(lane.ranks, tuple(piece for slot in lane.slots for piece in ranges(slot))) for lane in schedule.lanes
    )


@st.composite
def filled_schedules(draw: st.DrawFn) -> Schedule:
    """A random schedule of encoders beside an LLM over two tensor parallel ranks, with random work inside its computations."""
    pp = draw(st.sampled_from([1, 2]))
    size = draw(st.sampled_from([(1, pp, 2), (pp, 1, 2), (2 * pp, 1, 1), (2, pp, 1), (1, 1, 2)]))
    sizes = {"vision": size, "llm": (1, pp, 2)}
    frozen = ["vision"] if draw(st.booleans()) else []
    num_samples = draw(st.integers(2, 5))
    groups = {"vision": deal(num_samples, size[0]), "llm": deal(num_samples, 1)}
    case = build_case(build_graph("vision", frozen=frozen), sizes, groups, colocated=True)
    schedule = BUILDERS[draw(st.sampled_from(["gpipe", "1f1b"]))](case)
    places = sorted({action.place for action in schedule.work.computed if action.microbatch >= 0 and action.unit == "vision"})
    schedule = cut_in_ranges(schedule, {place: draw(segment_cuts(case, place)) for place in places if draw(st.booleans())})
    for action in schedule.work.computed:
        if action.unit == "vision" and action.microbatch >= 0 and draw(st.booleans()):
            schedule = _with_inside(schedule, action, wait=draw(st.integers(0, 3)))
    return schedule


def _with_inside(schedule: Schedule, action: Action, *, wait: int) -> Schedule:
    """The schedule with one computation inside the next one of the LLM, where it fits there."""

    def moved(lane: Lane) -> Lane:
        slots = list(lane.slots)
        if action in lane.actions:
            position = lane.actions.index(action)
            slot = slots.pop(position)._replace(mode=SlotMode.INSIDE, wait=wait)
            in_line = (at for at in range(position, len(slots)) if slots[at].mode is SlotMode.IN_LINE)
            carrier = next((at for at in in_line if slots[at].action.unit == "llm" and slots[at].action.microbatch >= 0), None)
            if carrier is None:
                return lane
            first = carrier
            while first > 0 and slots[first - 1].mode is SlotMode.INSIDE and slots[first - 1].wait > wait:
                first -= 1
            slots.insert(first, slot)
        return Lane(lane.ranks, tuple(slots))

    try:
        filled = schedule.with_lanes(map(moved, schedule.lanes))
        validate_schedule(filled, options=RunOptions(transformer_impl="local", sequence_parallel=False))
    except ScheduleError:
        return schedule
    return filled


@st.composite
def broken_schedules(draw: st.DrawFn) -> tuple[StepShape, tuple[Lane, ...], bool]:
    """As `built_schedules`, but actions of a lane change places, are missing, stand twice, or in another lane."""
    case, schedule, lowered = draw(built_schedules())
    lanes = [list(lane.actions) for lane in schedule.lanes]
    for _ in range(draw(st.integers(1, 3))):
        lane = draw(st.sampled_from([index for index, actions in enumerate(lanes) if actions] or [0]))
        actions = lanes[lane]
        if not actions:
            continue
        first, second = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        match draw(st.sampled_from(["swap", "swap", "swap", "drop", "repeat", "move"])):
            case "swap":
                actions[first], actions[second] = actions[second], actions[first]
            case "drop":
                actions.pop(first)
            case "repeat":
                actions.insert(second, actions[first])
            case "move":
                lanes[draw(st.integers(0, len(lanes) - 1))].append(actions.pop(first))
    modes = (SlotMode.IN_LINE, SlotMode.FILLS_WAIT)
    rows = (
        Lane(lane.ranks, tuple(Slot(action, modes[at in lane.fillers]) for at, action in enumerate(actions)))
        for lane, actions in zip(schedule.lanes, lanes, strict=True)
    )
    return case, tuple(rows), lowered


@dataclass(frozen=True)
class UniformCosts(ActionCosts):
    forward: float = 1.0
    backward: float = 2.0
    tensor_parallel_share: float = 0.0
    latency: float = 0.0
    occupied: float = 0.0
    link: int = -1
    collective: float | Callable[[Action], float] = 0.0
    model_flops: float = 0.0
    peak_flops_per_second: float = 0.0

    def compute(self, action: Action) -> ComputeCost:
        seconds = {ActionKind.FORWARD: self.forward, ActionKind.BACKWARD: self.backward}.get(action.kind, self.backward / 2)
        return ComputeCost(seconds, seconds * self.tensor_parallel_share)

    def transfer(self, send: Action) -> TransferCost:
        return TransferCost(self.latency, self.occupied, self.link)

    def collective_seconds(self, action: Action) -> float:
        return self.collective(action) if callable(self.collective) else self.collective

    def activation_bytes(self, place: Place) -> int:
        return 10

    def static_bytes(self, lane: int) -> int:
        return 1000 + lane


@dataclass(frozen=True)
class GivenCosts(UniformCosts):
    seconds: Callable[[Action], float | ComputeCost] = lambda action: 1.0
    kept: Callable[[Place], int] = lambda place: 10
    static: int | None = None
    """Bytes of weights on every rank."""
    memory_bytes: float = math.inf

    def compute(self, action: Action) -> ComputeCost:
        found = self.seconds(action)
        return found if isinstance(found, ComputeCost) else ComputeCost(found)

    def activation_bytes(self, place: Place) -> int:
        return self.kept(place)

    def static_bytes(self, lane: int) -> int:
        return super().static_bytes(lane) if self.static is None else self.static


def costs_of(*, backward: float = 2.0, **forward_seconds: float) -> GivenCosts:
    """Seconds of each unit's forwards; whole backwards take so many times as long, and either half of one half of that."""
    factors = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: backward}
    return GivenCosts(seconds=lambda action: forward_seconds[action.unit] * factors.get(action.kind, backward / 2))


@dataclass(frozen=True)
class RandomCosts(UniformCosts):
    """Everything takes a time of its own, some of them none; two links are shared."""

    seed: int = 0
    num_waits: int = 0
    """Waits of a computation in which others can run."""

    def _draw(self, action: Action) -> float:
        return Random(f"{self.seed} {tuple(action)}").choice((0.0, 0.5, 1.0, Random(f"{tuple(action)}").uniform(0, 3)))

    def compute(self, action: Action) -> ComputeCost:
        waiting = self._draw(action) / 4
        return ComputeCost(self._draw(action), waiting, (waiting / max(1, self.num_waits),) * self.num_waits)

    def transfer(self, send: Action) -> TransferCost:
        return TransferCost(self._draw(send) / 10, self._draw(send) / 5, (send.microbatch + send.stage) % 3 - 1)

    def collective_seconds(self, action: Action) -> float:
        return self._draw(action)


def built(name: str, step: StepShape, costs: UniformCosts) -> Schedule:
    """The lowered, validated schedule of a builder with these costs."""
    return build_schedule(BUILDERS[name].with_costs(costs), step)


def seconds_of(name: str, step: StepShape, costs: UniformCosts) -> float:
    """How long a step takes in the schedule of a builder with these costs."""
    return simulate_schedule(built(name, step, costs), costs).iteration_seconds


def most_kept(schedule: Schedule, unit: str | None = None) -> list[int]:
    """Per lane the most microbatches, of one unit or of all, between forward and the end of their backward."""
    changes = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1}
    rows = ([changes.get(action.kind, 0) for action in lane.actions if unit in (None, action.unit)] for lane in schedule.lanes)
    return [max(accumulate(row), default=0) for row in rows]
