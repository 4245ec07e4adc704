"""How long an action takes on the clock of the list scheduler: small whole numbers, the same for every microbatch."""

from multimodal.values.backward_need import BackwardNeed, stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Resource


def unit_cost(action: Action, graph: ModelGraph, plan: Plan) -> int:
    """Return an action's duration in clock ticks: forward 1, backward 2 (1 for each half), messages 0, reduction 1.

    A backward is two products per weight matrix, one for the input's and one for the weight's gradient; a stage that only
    passes a gradient on does one of them.
    """
    if ACTION_TABLE[action.kind].resource in (Resource.SEND, Resource.RECEIVE):
        return 0
    if action.kind is not ActionKind.BACKWARD:
        return 1
    need = stage_backward_need(graph, plan, action.unit, action.replica, action.stage)
    return 1 if need is BackwardNeed.INPUT_GRADIENT else 2
