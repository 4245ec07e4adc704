"""The samples of generators: each follows the LLM, whose outputs it consumes."""

from collections.abc import Sequence

from multimodal.values.assignment import Assignment, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths

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


def drop_idle_samples(assignment: Assignment, *, graph: ModelGraph, lengths: Sequence[SampleLengths]) -> Assignment:
    """Take the samples that have nothing for a generator to make out of its microbatches, and microbatches that end up empty.

    lengths: the global batch. Nothing else moves; an assignment without generators comes back as it is. O(samples).
    """
    if not graph.generators:
        return assignment
    units = dict(assignment.units)
    for unit in graph.generators:
        busy = {sample.sample_id for sample in lengths if any(item.unit == unit.name for item in sample.items)}
        kept = [
            [tuple(atom for atom in microbatch if atom.sample_id in busy) for microbatch in replica]
            for replica in units[unit.name]
        ]
        units[unit.name] = tuple(tuple(filter(None, replica)) for replica in kept)
    return Assignment(units)
