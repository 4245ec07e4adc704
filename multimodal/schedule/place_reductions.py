"""Where gradients are reduced: as early as their stage is done, in one order everywhere."""

from multimodal.schedule.expected_actions import collective_actions
from multimodal.schedule.lane_execution import execute_lanes
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Lane, Schedule


def place_reductions(schedule: Schedule, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> Schedule:
    """Put the gradient reductions into a compute-dialect schedule that has none.

    A lane only starts a reduction there, so that it hides behind what the lane computes afterwards. It stands right after its
    stage's last backward or weight gradient in the lane, but after the lane's earlier reductions in one order for all lanes:
    downstream units first, then later stages, the order in which backwards end. A stage without microbatches on this replica,
    whose part is done at once, waits for the lane's end: early, it would hold the lane up until the others come.

    Where lanes would wait for each other in a circle if a reduction blocked its lane, all reductions stand at the lanes' ends.
    O(actions + dependencies).
    """
    reductions = _reductions(graph, plan)
    early = Schedule(tuple(_with_early(lane, actions) for lane, actions in zip(schedule.lanes, reductions, strict=True)))
    if not execute_lanes(early, graph=graph, plan=plan, assignment=assignment, lowered=False).stuck(early):
        return early
    lanes = zip(schedule.lanes, reductions, strict=True)
    return Schedule(tuple(Lane(lane.ranks, (*lane.actions, *actions), lane.fillers) for lane, actions in lanes))


def _reductions(graph: ModelGraph, plan: Plan) -> list[list[Action]]:
    """The reductions of every lane, in the order in which all lanes do them."""
    position = {unit: index for index, unit in enumerate(graph.unit_names)}
    everything = collective_actions(graph, plan)
    found: list[list[Action]] = [[] for _ in plan.lanes]
    for action in sorted(
        (action for action in everything if action.kind is ActionKind.REDUCE_GRADIENTS),
        key=lambda action: (-position[action.unit], -action.stage, action.replica),
    ):
        for lane in plan.lanes_of_stage(action.unit, action.replica, action.stage):
            found[lane].append(action)
    return found


def _with_early(lane: Lane, reductions: list[Action]) -> Lane:
    last = {action[1:4]: position for position, action in enumerate(lane.actions)}
    after: dict[int, list[Action]] = {}
    earliest = 0
    for reduction in reductions:
        earliest = max(earliest, last.get(reduction[1:4], len(lane.actions) - 1))
        after.setdefault(earliest, []).append(reduction)
    actions = [each for position, action in enumerate(lane.actions) for each in (action, *after.get(position, ()))]
    return Lane(lane.ranks, (*actions, *([] if lane.actions else reductions)))
