"""The timeline of a schedule under unit costs: how its shape looks when every microbatch is alike."""

from dataclasses import dataclass

from multimodal.cost.step_costs import ComputeCost, TransferCost
from multimodal.schedule.compile_schedule import compile_schedule
from multimodal.schedule.simulate import check_finished
from multimodal.schedule.simulate_events import simulate_events
from multimodal.schedule.simulated_timeline import build_timeline
from multimodal.schedule.unit_cost import unit_cost
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Place, Schedule
from multimodal.values.timeline import Timeline


@dataclass(frozen=True)
class UnitCosts:
    """Forward 1 s, backward 2 s (1 s for each half), collectives 1 s, immediate messages; nothing has a size."""

    graph: ModelGraph
    plan: Plan
    model_flops: float = 0.0
    peak_flops_per_second: float = 0.0

    def compute(self, action: Action) -> ComputeCost:
        """Cost of a computation."""
        return ComputeCost(unit_cost(action, self.graph, self.plan))

    def transfer(self, send: Action) -> TransferCost:
        """Cost of a message: none."""
        return TransferCost(0.0, 0.0)

    def collective_seconds(self, action: Action) -> float:
        """Seconds of a collective."""
        return unit_cost(action, self.graph, self.plan)

    def activation_bytes(self, place: Place) -> int:
        """Nothing."""
        return 0

    def static_bytes(self, lane: int) -> int:
        """Nothing."""
        return 0


def timeline_of_unit_costs(
    schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, lowered: bool = False
) -> Timeline:
    """Simulate a valid schedule of either dialect with `UnitCosts`.

    In the lowered dialect the time that a lane stands still for a message is an event of its receive. Raises ScheduleError
    when the schedule cannot finish.
    """
    compiled = compile_schedule(
        schedule, graph=graph, plan=plan, assignment=assignment, costs=UnitCosts(graph, plan), lowered=lowered
    )
    times = simulate_events(compiled.arrays)
    check_finished(compiled, times)
    return build_timeline(compiled, times)
