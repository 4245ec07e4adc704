"""The samples of generators: each follows the LLM, whose outputs it consumes."""

from collections.abc import Sequence

from multimodal.values.assignment import Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

Replicas = tuple[tuple[Microbatch, ...], ...]


def place_generators(llm: Sequence[Sequence[Microbatch]], *, graph: ModelGraph, plan: Plan) -> dict[str, Replicas]:
    """Give every generator the LLM's microbatches as they are, dealt round robin to the generator's own replicas.

    llm: the LLM's replicas. They are taken in the order in which they are computed: all replicas' first microbatches, then all
    second ones, and so on, so that a generator with as many replicas keeps its placement
    where these have equally many microbatches. O(samples).
    """
    num_rounds = max((len(replica) for replica in llm), default=0)
    in_time = [replica[index] for index in range(num_rounds) for replica in llm if index < len(replica)]
    return {
        unit.name: tuple(
            tuple(in_time[replica :: plan.units[unit.name].data_parallel_size])
            for replica in range(plan.units[unit.name].data_parallel_size)
        )
        for unit in graph.generators
    }
