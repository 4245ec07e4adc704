"""How long an action takes on the clock of the list scheduler: small whole numbers, the same for every microbatch."""

from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import ACTION_TABLE, Action, ActionKind, Resource


def unit_cost(action: Action, graph: ModelGraph, plan: Plan) -> int:
    """Return an action's duration in clock ticks: forward 1, backward 2 (1 for each half), messages 0, reduction 1.

    A backward is two products per weight matrix, one for the input's and one for the weight's gradient. A stage that only passes
    a gradient on does one of them, and one that trains little more than its projector hardly any: 1 is the least.
    """
    if ACTION_TABLE[action.kind].resource in (Resource.SEND, Resource.RECEIVE):
        return 0
    if action.kind is not ActionKind.BACKWARD:
        return 1
    layers = plan.virtual_stage(action.unit, action.replica, action.stage).layers
    is_trained = [graph.unit(action.unit).is_trainable(layer) for layer in layers]
    sends = stage_backward_need(graph, plan, action.unit, action.replica, action.stage).sends_gradient
    num_passing = len(layers) if sends else len(layers) - 1 - is_trained.index(True)
    return max(1, round((num_passing + sum(is_trained)) / len(layers)))
