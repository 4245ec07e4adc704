"""From values to a schedule that can run: build, rewrite, lower, validate."""

from collections.abc import Sequence

from multimodal.schedule.builders import Builder
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule


def build_schedule(
    builder: Builder,
    graph: ModelGraph,
    plan: Plan,
    assignment: Assignment,
    *,
    passes: Sequence[Pass] = (),
    forward_only: bool = False,
) -> Schedule:
    """Return a lowered, validated schedule; the one way there for the run, the simulator and the emulator.

    passes: applied one after another to what the builder emits; a forward-only schedule, in which there is nothing to cut, stays
    as it is. Raises ScheduleError.
    """
    schedule = builder(graph, plan, assignment, forward_only=forward_only)
    for rewrite in () if forward_only else passes:
        schedule = rewrite(schedule, graph=graph, plan=plan, assignment=assignment)
    schedule = insert_communication(schedule, graph=graph, plan=plan, assignment=assignment)
    validate_schedule(schedule, graph=graph, plan=plan, assignment=assignment, lowered=True, forward_only=forward_only)
    return schedule
