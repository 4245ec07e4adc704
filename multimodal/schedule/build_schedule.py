"""Makes a runnable schedule of a step (build, rewrite, lower, validate), and caches schedules by the assignment's shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.align_replicas import Joins, align_replicas
from multimodal.schedule.builders import Builder, ScheduleRow
from multimodal.schedule.compile_schedule import CompiledSchedule, compile_schedule
from multimodal.schedule.expert_groups import check_expert_groups
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.settle_fillers import settle_fillers
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


def build_schedule(
    builder: Builder, shape: StepShape, *, passes: Sequence[Pass] = (), is_checked: bool = True, costs: StepCosts | None = None
) -> Schedule:
    """Return a lowered schedule of a shape. The run, the simulator and the emulator all use this function.

    passes: applied one after another to the builder's schedule, unless it is forward-only: then there is nothing to cut.
    is_checked: validate the result; costs: those that the builder used, if any; they know the options of the run.
    Raises ScheduleError.
    """
    schedule = builder(shape)
    for rewrite in () if shape.forward_only else passes:
        schedule = rewrite(schedule)
    lowered = insert_communication(schedule)
    if is_checked:
        validate_schedule(lowered, before=schedule, options=None if costs is None else costs.options)
    return lowered


@dataclass(frozen=True)
class BuiltSchedule:
    """The schedule of one shape, and values that are derived from it on demand."""

    schedule: Schedule
    _settled: list[Schedule] = field(default_factory=list)

    def to_run(self, costs: Callable[[], StepCosts]) -> Schedule:
        """Return the schedule with every filler in its final place, by the costs of the first step that asks for it."""
        if not self._settled:
            self._settled.append(settle_fillers(self.schedule, costs()) if self.schedule.has_fillers else self.schedule)
        return self._settled[0]

    @cached_property
    def compiled(self) -> CompiledSchedule:
        """The schedule as the simulator compiles it, without durations."""
        return compile_schedule(self.schedule)

    @cached_property
    def joins(self) -> Joins:
        """The computations that lanes join if replicas share their weights (`align_replicas`)."""
        return align_replicas(self.schedule)

    @cached_property
    def computes_together(self) -> bool:
        """True if replicas share experts, and compute in one order; raises ScheduleError if their orders differ."""
        check_expert_groups(self.schedule)
        return bool(self.schedule.shape.plan.units_with_shared_experts)


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
    _built: dict[StepShape, BuiltSchedule] = field(default_factory=dict)

    def shape(self, assignment: Assignment) -> StepShape:
        """Return the shape of an assignment's step."""
        return assignment.shape(self.graph, self.plan, forward_only=self.forward_only)

    @property
    def needs_costs(self) -> bool:
        """True if schedules depend on the costs of the step in addition to its shape."""
        return self.builder.needs_costs

    def find(self, shape: StepShape, costs: StepCosts | None = None) -> BuiltSchedule:
        """Return the schedule of a shape, built now or for an earlier step of this shape; raises ScheduleError.

        costs: of the step; a builder that needs costs builds anew whenever they are given, and otherwise takes unit costs.
        """
        if costs is not None and self.needs_costs:
            builder = self.builder.with_costs(costs)
            return BuiltSchedule(build_schedule(builder, shape, passes=self.passes, costs=costs))
        if shape not in self._built:
            if len(self._built) >= self.capacity:
                self._built.pop(next(iter(self._built)))
            self._built[shape] = BuiltSchedule(build_schedule(self.builder, shape, passes=self.passes))
        return self._built[shape]

    def schedule(self, assignment: Assignment) -> Schedule:
        """Return the schedule that `find` finds for an assignment's shape, without costs; raises ScheduleError."""
        return self.find(self.shape(assignment)).schedule
