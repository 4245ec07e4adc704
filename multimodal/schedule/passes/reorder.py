"""Run microbatches in another order, as a balancer wants it (DistTrain, Alg. 3)."""

from collections.abc import Mapping, Sequence

from multimodal.values.assignment import Assignment
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, Lane, Schedule

MicrobatchOrder = Mapping[tuple[str, int], Sequence[int]]
"""(unit, replica) -> its microbatches in the order in which they are to run."""


def reorder(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment, order: MicrobatchOrder) -> Schedule:
    """Let microbatch `order[unit, replica][k]` run wherever the schedule ran microbatch k; others stay.

    The shape of the schedule (warm-up, who follows whom) stays; data that depend on each other must move alike in all units, or
    the validator finds the deadlock. Raises ScheduleError for an order that is no permutation. O(actions).
    """
    for (unit, replica), microbatches in order.items():
        num_microbatches = assignment.num_microbatches(unit, replica)
        if sorted(microbatches) != list(range(num_microbatches)):
            raise ScheduleError(
                f"unit '{unit}', replica {replica}: the order {list(microbatches)} must name each of its {num_microbatches} "
                "microbatches once"
            )

    def moved(action: Action) -> Action:
        microbatches = order.get((action.unit, action.replica))
        if microbatches is None or action.microbatch < 0:
            return action
        return action._replace(microbatch=microbatches[action.microbatch])

    return Schedule(tuple(Lane(lane.ranks, tuple(map(moved, lane.actions)), lane.fillers) for lane in schedule.lanes))
