"""Which encoder microbatches the copies of an encoder repeat when every stage of the LLM has one (encoders replicated)."""

from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Place


def repeated_places(encoder: str, replica: int, *, graph: ModelGraph, plan: Plan, assignment: Assignment) -> tuple[Place, ...]:
    """Return the microbatches that an encoder replica computes besides its own, in the order in which the LLM takes them.

    A replica stands beside one stage of one LLM replica (the same ranks), and computes whatever that LLM replica takes of the
    encoder. A replica that stands beside none repeats nothing. O(routes of the LLM replica).
    """
    backbone = graph.backbone.name
    beside = plan.stage_of_ranks.get((backbone, plan.units[encoder].replicas[replica].stages[0].ranks))
    if beside is None:
        return ()
    routes = assignment.routes(graph).to_target
    sources = [
        route.source
        for microbatch in range(assignment.num_microbatches(backbone, beside[0]))
        for route in routes.get(MicrobatchPlace(backbone, beside[0], microbatch), ())
        if route.source.unit == encoder and route.source.replica != replica
    ]
    return tuple(Place(encoder, source.replica, 0, source.microbatch) for source in dict.fromkeys(sources))


def copy_beside(target: Place, encoder: str, *, plan: Plan) -> int:
    """Return the encoder replica that has the ranks of an LLM stage; -1 where there is none."""
    ranks = plan.virtual_stage(*target[:3]).ranks
    return plan.stage_of_ranks.get((encoder, ranks), (-1, 0))[0]


def consumers_beside(
    original: Place, replica: int, *, graph: ModelGraph, plan: Plan, assignment: Assignment
) -> tuple[Place, ...]:
    """Return the places of the LLM on a copy's ranks that take the microbatch that it repeats."""
    backbone = graph.backbone.name
    beside = plan.stage_of_ranks.get((backbone, plan.units[original.unit].replicas[replica].stages[0].ranks))
    if beside is None:
        return ()
    source = MicrobatchPlace(original.unit, original.replica, original.microbatch)
    microbatches = [
        route.target.microbatch
        for route in assignment.routes(graph).from_source.get(source, ())
        if (route.target.unit, route.target.replica) == (backbone, beside[0])
    ]
    stages = [each.index for each in plan.units[backbone].replicas[beside[0]].virtual_stages if each.stage_index == beside[1]]
    return tuple(Place(backbone, beside[0], stage, microbatch) for microbatch in microbatches for stage in stages)
