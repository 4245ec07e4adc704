"""The plainest balancer: samples as they come, dealt round robin. The baseline of all others."""

from collections.abc import Mapping, Sequence

from multimodal.balance.encoder_items import list_items
from multimodal.balance.generator_samples import place_generators
from multimodal.balance.validate_inputs import validate_inputs
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths, index_by_sample


def balance_in_order(
    lengths: Sequence[SampleLengths],
    *,
    graph: ModelGraph,
    plan: Plan,
    micro_batch_size: int,
    encoder_micro_batch_sizes: Mapping[str, int],
) -> Assignment:
    """Cut the global batch into microbatches as it comes and deal them to the replicas round robin.

    Microbatch k of the LLM holds samples k * micro_batch_size and following, and goes to replica k % dp. An encoder's
    microbatch k holds the items of that microbatch and goes to the encoder's replica k % dp; where there are none, k is left
    out. An encoder named in `encoder_micro_batch_sizes` instead gets its items, in the LLM's order, in microbatches of that
    many items, dealt the same way.

    The last microbatch may be smaller and replicas may get unequal numbers of microbatches, or none.

    lengths: the global batch in its order.
    micro_batch_size: samples per LLM microbatch.
    encoder_micro_batch_sizes: unit -> items per microbatch.

    Raises AssignmentError when the batch is empty or a size is below 1. O(items).
    """
    validate_inputs(lengths, graph=graph, micro_batch_size=micro_batch_size, encoder_micro_batch_sizes=encoder_micro_batch_sizes)
    lengths_by_sample = index_by_sample(lengths)
    llm = _cut(tuple(Atom(sample.sample_id) for sample in lengths), size=micro_batch_size)
    units = {}
    for unit in graph.encoders:
        items = [list_items(microbatch, unit=unit.name, lengths_by_sample=lengths_by_sample) for microbatch in llm]
        if (size := encoder_micro_batch_sizes.get(unit.name)) is not None:
            items = _cut(tuple(atom for microbatch in items for atom in microbatch), size=size)
        units[unit.name] = _deal(items, num_replicas=plan.units[unit.name].data_parallel_size)
    backbone = graph.backbone.name
    units[backbone] = _deal(llm, num_replicas=plan.units[backbone].data_parallel_size)
    return Assignment({**units, **place_generators(units[backbone], graph=graph, plan=plan)})


def _cut(atoms: Microbatch, *, size: int) -> list[Microbatch]:
    return [atoms[first : first + size] for first in range(0, len(atoms), size)]


def _deal(microbatches: Sequence[Microbatch], *, num_replicas: int) -> tuple[tuple[Microbatch, ...], ...]:
    return tuple(tuple(filter(None, microbatches[replica::num_replicas])) for replica in range(num_replicas))
