"""Schedules by the shape of the assignment: what they are built from is counts and routes, not sample ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from multimodal.schedule.align_replicas import Joins, align_replicas
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import Builder
from multimodal.schedule.compile_schedule import CompiledStructure, compile_structure
from multimodal.schedule.passes import Pass
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule

Shape = tuple[object, ...]


@dataclass
class ScheduleCache:
    """Lowered, validated schedules, and what the simulator makes of them."""

    graph: ModelGraph
    plan: Plan
    builder: Builder
    passes: Sequence[Pass] = ()
    """Applied one after another to what the builder emits; forward-only schedules, in which there is nothing to cut, stay."""
    forward_only: bool = False
    capacity: int = 64
    _schedules: dict[Shape, Schedule] = field(default_factory=dict)
    _structures: dict[Shape, CompiledStructure] = field(default_factory=dict)
    _joins: dict[Shape, Joins] = field(default_factory=dict)

    def schedule(self, assignment: Assignment) -> Schedule:
        """Build, lower and validate, or find what was built for the same shape; raises ScheduleError."""
        shape = shape_of(assignment, self.graph)
        if shape not in self._schedules:
            if len(self._schedules) >= self.capacity:
                oldest = next(iter(self._schedules))
                self._schedules.pop(oldest)
                self._structures.pop(oldest, None)
                self._joins.pop(oldest, None)
            self._schedules[shape] = build_schedule(
                self.builder, self.graph, self.plan, assignment, passes=self.passes, forward_only=self.forward_only
            )
        return self._schedules[shape]

    def structure(self, assignment: Assignment) -> CompiledStructure:
        """The schedule as the simulator compiles it, but for durations; raises ScheduleError."""
        schedule, shape = self.schedule(assignment), shape_of(assignment, self.graph)
        if shape not in self._structures:
            self._structures[shape] = compile_structure(schedule, graph=self.graph, plan=self.plan, assignment=assignment)
        return self._structures[shape]

    def joins(self, assignment: Assignment) -> Joins:
        """What lanes join where replicas share their weights (`align_replicas`); raises ScheduleError."""
        schedule, shape = self.schedule(assignment), shape_of(assignment, self.graph)
        if shape not in self._joins:
            self._joins[shape] = align_replicas(schedule, graph=self.graph, plan=self.plan, assignment=assignment)
        return self._joins[shape]


def shape_of(assignment: Assignment, graph: ModelGraph) -> Shape:
    """Return counts of microbatches and who routes to whom: assignments that agree in both have the same schedule. O(items)."""
    counts = tuple((unit, tuple(len(replica) for replica in replicas)) for unit, replicas in assignment.units.items())
    routes = assignment.routes(graph).from_source
    pairs = tuple(sorted((route.source, route.target) for found in routes.values() for route in found))
    return (counts, pairs)
