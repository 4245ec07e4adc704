"""No balancing: microbatches in the order of the samples, or of their lengths."""

import numpy as np

from multimodal.balance.algorithms.cut_evenly import cut_evenly
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.placement import deal, follow_llm
from multimodal.values.arrays.rows import Integers
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import LengthBatch


def balance_in_order(work: BatchWork, *, plan: Plan) -> Assignment:
    """Cut the global batch into microbatches in its order and deal them to the replicas round robin.

    Microbatch k holds samples k * micro_batch_size and following, and goes to replica k % dp; so does the encoder's microbatch of
    their items, if there are any, or one of `encoder_micro_batch_sizes` items in the LLM's order. The last microbatch may be
    smaller, and replicas may get unequal numbers of microbatches, or none. O(items).
    """
    ids = LengthBatch.of(work.lengths).arrays.sample_ids
    return _deal_in_order(np.searchsorted(work.arrays.sample_ids, ids), work, plan=plan)


def balance_sorted(work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance like `balance_in_order`, with samples sorted by LLM tokens, longest first; ties go by id. O(n log n)."""
    return _deal_in_order(np.argsort(-work.arrays.num_tokens, kind="stable"), work, plan=plan)


def _pack(num_tokens: Integers, *, most: int) -> Integers:
    """Return the starts of microbatches that take samples in order while they have room, and the number of samples."""
    starts, num_free = [0], most
    for index, tokens in enumerate(num_tokens.tolist()):
        if tokens > num_free and index > starts[-1]:
            starts.append(index)
            num_free = most
        num_free -= tokens
    return np.array([*starts, len(num_tokens)])


def _deal_in_order(samples: Integers, work: BatchWork, *, plan: Plan) -> Assignment:
    """Deal samples in the given order; samples: numbers of `BatchWork`."""
    options, num_replicas = work.options, plan.units[work.graph.backbone.name].data_parallel_size
    if options.num_microbatches is not None:
        ends, counts = np.array([0, len(samples)]), np.array([options.num_microbatches * num_replicas])
        starts, _ = cut_evenly(np.ones(len(samples), np.int64), ends, counts)
    elif options.tokens_per_microbatch is not None:
        starts = _pack(work.arrays.num_tokens[samples], most=options.tokens_per_microbatch)
    else:
        starts = np.append(np.arange(0, len(samples), options.micro_batch_size), len(samples))
    return follow_llm(deal(starts, samples, num_replicas=num_replicas), work, plan=plan)
