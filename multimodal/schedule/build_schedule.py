"""Makes a runnable schedule of a step (build, rewrite, lower, validate, settle fillers), and caches schedules by their shape."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise

import numpy as np

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.align_replicas import Alignment, Joins, by_position, check_expert_groups
from multimodal.schedule.builders import Builder, ScheduleRow
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.execute_lanes import ASSUMES_PROGRESS, can_finish
from multimodal.schedule.inside_slots import NO_CARRIER, carrier_slots
from multimodal.schedule.passes import Pass, PassRow
from multimodal.schedule.passes.insert_communication import insert_communication, with_messages
from multimodal.schedule.simulate_events import simulate_events
from multimodal.schedule.validate import validate_schedule
from multimodal.values.arrays.rows import Bools, Integers
from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import COMPUTE


def build_schedule(
    builder: Builder, shape: StepShape, *, passes: Sequence[Pass] = (), is_checked: bool = True, costs: StepCosts | None = None
) -> Schedule:
    """Return a lowered schedule of a shape. The run, the simulator and the emulator all use this function.

    passes: applied one after another to the builder's schedule, unless it is forward-only: then there is nothing to cut.
    is_checked: validate the result; costs: those that the builder used, if any; they know the options of the run.
    Raises ScheduleError.
    """
    return _lower(_build_computations(builder, shape, passes), costs, is_checked=is_checked)


def _build_computations(builder: Builder, shape: StepShape, passes: Sequence[Pass], *, is_draft: bool = False) -> Schedule:
    """Build and rewrite. A draft may be stuck; where it is not, nothing on the way to it was: it only had fewer actions."""
    chosen = () if shape.forward_only else tuple(passes)
    token = ASSUMES_PROGRESS.set(is_draft and all(isinstance(each, PassRow) and each.is_planned for each in chosen))
    try:
        schedule = builder(shape)
        for rewrite in chosen:
            schedule = rewrite(schedule)
    finally:
        ASSUMES_PROGRESS.reset(token)
    return schedule


def _lower(computed: Schedule, costs: StepCosts | None, *, is_checked: bool = True) -> Schedule:
    lowered = insert_communication(computed, costs)
    if is_checked:
        validate_schedule(lowered, options=None if costs is None else costs.options)
    return lowered


@dataclass(frozen=True)
class BuiltSchedule:
    """The schedule of one shape, and values that are derived from it on demand."""

    draft: Schedule
    """In the compute dialect; `computed` unless that is built otherwise, since lanes of the draft would wait in a circle."""
    build_surely: Callable[[], Schedule]
    costs: StepCosts | None = None
    """Those of the step that it was built for; None: it is for any step of the shape."""
    _checked: list[bool] = field(default_factory=list)

    @cached_property
    def computed(self) -> Schedule:
        """In the compute dialect."""
        return self.draft if can_finish(self.draft) else self.build_surely()

    @cached_property
    def schedule(self) -> Schedule:
        """The lowered schedule, by `costs` or unit costs; raises ScheduleError."""
        return self._lower(self.costs)

    def _lower(self, costs: StepCosts | None, *, is_checked: bool = True) -> Schedule:
        try:
            return _lower(self.draft, costs, is_checked=is_checked)
        except ScheduleError:
            return _lower(self.computed, costs, is_checked=is_checked)

    def to_run(self, costs: StepCosts) -> Schedule:
        """Return the schedule for a step of these costs: with its messages and every filler in their final places.

        All ranks must do this for the same steps, whatever they have built before: it depends on nothing else. Raises
        ScheduleError if replicas share experts, and their orders differ.
        """
        if not self._checked and self.draft.shape.plan.units_with_shared_experts:
            check_expert_groups(self._lower(None))
        if self.costs is not None:
            return settle_fillers(self.schedule, costs)
        placed = self._lower(costs, is_checked=not self._checked)
        self._checked.append(True)
        return settle_fillers(placed, costs)

    @cached_property
    def compiled(self) -> CompiledSchedule:
        """The schedule as the simulator compiles it, without durations."""
        return compile_schedule(self.schedule)

    @cached_property
    def together(self) -> tuple[Schedule, Joins]:
        """The schedule of replicas that share their weights, and the computations that lanes join.

        The messages of `computed` are in the order of `align_replicas`. The two ends of a message, and what replicas compute
        together, then have one order for all lanes, in which each could be finished before the next begins: on GPUs a message
        holds up the gathering behind it, whose peers may be behind others.
        """
        alignment, work = Alignment(self.schedule, None), self.computed.work
        alignment.run()
        numbers, starts = work.numbers(lowered=False), np.full(work.num_computed, -1, np.int64)
        for action, number in alignment.order.items():
            starts[numbers[action]] = number
        producers, consumers = work.message_ends
        messages = np.flatnonzero(starts[consumers] >= 0)
        placed, moments = with_messages(self.computed, messages, starts=starts, at=1 + 2 * starts[producers])
        bounds = list(pairwise(placed.lane_starts.tolist()))
        joins = (
            [(int(np.searchsorted(moments[slice(*bounds[lane])], 2 * number)), number, join) for _, number, join in found]
            for lane, found in enumerate(alignment.joins)
        )
        return placed, tuple(map(by_position, joins))


MOST_KEPT_SLOTS = 1 << 20
"""Most slots of all schedules of a cache. With what is derived from it one takes 250 bytes, and large steps hardly have equal
shapes."""


@dataclass
class ScheduleCache:
    """Lowered, validated schedules by shape, with the simulator's compiled form and the executor's joins.

    Schedules depend on counts and routes, not on sample ids: steps of one shape share their schedule.
    """

    graph: ModelGraph
    plan: Plan
    builder: ScheduleRow
    passes: Sequence[Pass] = ()
    """Applied one after another to the builder's schedule, unless it is forward-only: then there is nothing to cut."""
    forward_only: bool = False
    capacity: int = 64
    """Most schedules that are kept, as far as they have at most `MOST_KEPT_SLOTS` together; the latest one always is."""
    _built: dict[StepShape, BuiltSchedule] = field(default_factory=dict)

    def shape(self, assignment: Assignment) -> StepShape:
        """Return the shape of an assignment's step."""
        return assignment.shape(self.graph, self.plan, forward_only=self.forward_only)

    def find(self, shape: StepShape, costs: StepCosts | None = None) -> BuiltSchedule:
        """Return the schedule of a shape, built now or for an earlier step of this shape; raises ScheduleError.

        costs: of the step; a builder that needs costs builds anew whenever they are given, and otherwise takes unit costs.
        """
        if costs is not None and self.builder.needs_costs:
            return self._build(self.builder.with_costs(costs), shape, costs)
        if shape not in self._built:
            built = self._build(self.builder, shape)
            num_kept = min(self.capacity, MOST_KEPT_SLOTS // (1 + len(built.draft.pieces)))
            for oldest in list(self._built)[: max(0, 1 + len(self._built) - num_kept)]:
                del self._built[oldest]
            self._built[shape] = built
        return self._built[shape]

    def _build(self, builder: Builder, shape: StepShape, costs: StepCosts | None = None) -> BuiltSchedule:
        build = partial(_build_computations, builder, shape, self.passes)
        return BuiltSchedule(build(is_draft=True), build, costs)

    def schedule(self, assignment: Assignment) -> Schedule:
        """Return the schedule that `find` finds for an assignment's shape, without costs; raises ScheduleError."""
        return self.find(self.shape(assignment)).schedule


def settle_fillers(schedule: Schedule, costs: StepCosts) -> Schedule:
    """Return a valid lowered schedule with every filler in line, at its place in a simulation with these costs.

    That place is before its carrier, while the carrier would wait, or right behind the carrier. Both orders are valid, and only
    weight gradients fill, for which no lane waits; so lanes that use other costs still fit together. Fillers of one carrier run
    in the order of their starts: fillers with unmet needs are passed over. O(actions + dependencies).
    """
    fillers = np.flatnonzero(schedule.modes == SlotMode.FILLS_WAIT)
    if not len(fillers):
        return schedule
    compiled = compile_schedule(schedule).with_costs(costs)
    times, nodes = simulate_events(compiled.arrays), compiled.arrays.lane_nodes
    starts, ends = np.full((2, len(schedule.pieces)), np.nan)
    starts[compiled.slots], ends[compiled.slots] = times.start_seconds[nodes], times.end_seconds[nodes]
    carriers = carrier_slots(schedule, fillers)
    fillers, carriers = fillers[carriers != NO_CARRIER], carriers[carriers != NO_CARRIER]
    is_late, places = np.zeros(len(schedule.pieces), np.bool_), np.arange(len(schedule.pieces))
    is_late[fillers] = starts[fillers] >= ends[carriers]  # they start when their carrier has ended
    places[fillers[np.argsort(carriers, kind="stable")]] = fillers[np.lexsort((starts[fillers], carriers))]
    lanes = (list(_in_line(schedule, is_late, places, lane)) for lane in range(schedule.num_lanes))
    order = np.array(list(chain.from_iterable(lanes)), np.int64)
    modes = np.where(schedule.modes == SlotMode.FILLS_WAIT, SlotMode.IN_LINE, schedule.modes).astype(np.uint8)
    return Schedule(
        schedule.shape, schedule.lane_starts, schedule.pieces[order], modes[order], schedule.waits[order], schedule.lowered
    )


def _in_line(schedule: Schedule, is_late: Bools, places: Integers, lane: int) -> Iterator[int]:
    """Yield the slots of a lane in their new order; places: the slot that runs in place of each slot."""
    resources, late = schedule.work.resources[schedule.pieces], []
    has_run = False
    for slot in places[schedule.lane_starts[lane] : schedule.lane_starts[lane + 1]].tolist():
        if is_late[slot]:
            late.append(slot)
            continue
        if has_run:
            yield from late
            late, has_run = [], False
        yield slot
        has_run |= bool(late) and resources[slot] == COMPUTE and schedule.modes[slot] == SlotMode.IN_LINE
    yield from late
