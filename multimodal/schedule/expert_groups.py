"""The order in which replicas that share experts compute: the same in all of them."""

from multimodal.schedule.align_replicas import align_replicas, exchanges_tokens, kind_of_exchange
from multimodal.values.action import Action
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule


def check_expert_groups(schedule: Schedule) -> None:
    """Raise ScheduleError where replicas that share experts would wait for each other for ever.

    In every layer with experts they exchange tokens, so the i-th computation of a stage must be of one kind and microbatch in all
    replicas, and some order of the whole step must bring all of them there together. O(actions + dependencies).
    """
    units = schedule.step.plan.units_with_shared_experts
    for unit in units:
        plan = schedule.step.plan.units[unit]
        for stage in range(plan.num_virtual_stages):
            orders = [_order(schedule, unit, replica, stage) for replica in range(plan.data_parallel_size)]
            for replica, order in enumerate(orders):
                if order != orders[0]:
                    raise ScheduleError(_problem(unit, f"stage {stage} of replicas 0 and {replica} computes in different orders"))
    if units and any(align_replicas(schedule, units)):
        raise ScheduleError(_problem(units[0], "other units keep its replicas from computing together"))


def _problem(unit: str, found: str) -> str:
    return (
        f"unit '{unit}': {found}, and replicas that share experts exchange tokens in every layer; use --schedule 1f1b, or "
        "--expert-model-parallel-size 1"
    )


def _order(schedule: Schedule, unit: str, replica: int, stage: int) -> list[Action]:
    """Return the computations of one stage of one replica, as if it were replica 0."""
    lane = schedule.lanes[schedule.step.plan.lanes_of_stage(unit, replica, stage)[0]]
    return [
        action._replace(kind=kind_of_exchange(action), replica=0)
        for action in lane.actions
        if action[1:4] == (unit, replica, stage) and exchanges_tokens(action)
    ]
