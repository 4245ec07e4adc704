"""A schedule, a balancer and a planner as somebody would add them: a function each, and its row.

In the product the function is a file beside its siblings and the row stands in their registry; here `add_rows` puts it there.
"""

from dataclasses import replace

from multimodal.balance import BALANCERS, BalancerRow
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.in_order import balance_in_order
from multimodal.plan.planners import PLANNERS, PlannerRow
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_candidates
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.builders.one_f_one_b import forward_limits
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape

ADDS_ROWS = "ADDS_ROWS"
"""Environment variable: whether a forked run has them."""
SCHEDULE, BALANCER, PLANNER = "forwards-first", "backwards-dealt", "one-stage-each"


def build_forwards_first(step: StepShape) -> Schedule:
    """Build 1F1B with one more microbatch in flight in each stage, and forwards before backwards inside that limit."""
    limits = {stage: limit + 1 for stage, limit in forward_limits(step).items()}
    return list_schedule(step, Policy(forward_limits=limits, forwards_go_first=True))


def balance_backwards(work: BatchWork, *, plan: Plan) -> Assignment:
    ordered = sorted(work.lengths, key=lambda sample: -sample.sample_id)
    return balance_in_order(replace(work, lengths=ordered), plan=plan)


def plan_one_stage_each(request: PlanningRequest) -> PlannedRun:
    layouts = {unit.name: even_layout(unit, StageSize(1), 1, 1) for unit in request.graph.units}
    chosen, seconds = choose_candidates(request, [Candidate(layouts)])[0]
    return chosen.to_run(request, seconds=seconds, schedule=SCHEDULE, balance=BALANCER)


def add_rows() -> None:
    BUILDERS[SCHEDULE] = ScheduleRow(build=build_forwards_first, meaning="1F1B, forwards first", in_flight=2.0)
    BALANCERS[BALANCER] = BalancerRow(balance=balance_backwards, meaning="the data's order, reversed", keeps_samples_whole=True)
    PLANNERS[PLANNER] = PlannerRow(name=PLANNER, plan=plan_one_stage_each, meaning="one GPU for every unit")
