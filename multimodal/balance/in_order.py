"""No balancing: microbatches as the samples come, or sorted by length."""

from collections.abc import Sequence

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, read_batch
from multimodal.balance.placement import cut_evenly, deal, follow_llm
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def balance_in_order(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Cut the global batch into microbatches as it comes and deal them to the replicas round robin.

    Microbatch k of the LLM holds samples k * micro_batch_size and following, and goes to replica k % dp. An encoder's
    microbatch k holds the items of that microbatch and goes to the encoder's replica k % dp; where there are none, k is left
    out. An encoder named in `encoder_micro_batch_sizes` instead gets its items, in the LLM's order, in microbatches of that
    many items, dealt the same way. The last microbatch may be smaller and replicas may get unequal numbers of microbatches, or
    none.

    lengths: the global batch in its order. Raises AssignmentError as `validate_inputs` does. O(items).
    """
    return _deal_in_order(lengths, read_batch(lengths, graph=graph, options=options), plan=plan)


def balance_sorted(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Balance like `balance_in_order`, with the samples sorted by their LLM tokens, longest first: microbatches of like samples.

    Ties go by sample id. Raises AssignmentError as `validate_inputs` does. O(n log n).
    """
    work = read_batch(lengths, graph=graph, options=options)
    return _deal_in_order(sorted(lengths, key=lambda sample: (-sample.num_tokens, sample.sample_id)), work, plan=plan)


def _deal_in_order(ordered: Sequence[SampleLengths], work: BatchWork, *, plan: Plan) -> Assignment:
    num_replicas = plan.units[work.graph.backbone.name].data_parallel_size
    microbatches = _cut([Atom(sample.sample_id) for sample in ordered], work.options, num_replicas=num_replicas)
    return follow_llm(deal(microbatches, num_replicas=num_replicas), work, plan=plan)


def _cut(samples: Sequence[Atom], options: BalanceOptions, *, num_replicas: int) -> list[Microbatch]:
    if options.num_microbatches is not None:
        return list(cut_evenly(samples, [1] * len(samples), count=options.num_microbatches * num_replicas))
    size = options.micro_batch_size
    return [tuple(samples[first : first + size]) for first in range(0, len(samples), size)]
