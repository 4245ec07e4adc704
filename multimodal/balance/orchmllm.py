"""Balances the drawn batch: only the LLM's samples, whole samples, or every unit on its own (OrchMLLM)."""

from itertools import pairwise

import numpy as np

from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.batch_work import BatchWork, sum_by
from multimodal.balance.length_cost import LINEAR_COST, LengthCost
from multimodal.balance.placement import Groups, follow_llm, place_every_unit
from multimodal.values.arrays.rows import Integers, group_rows, row_numbers
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan


def balance_llm_only(work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance the LLM's work, the best that is possible before the batch is drawn ("pre-balancing", OrchMLLM 3.2)."""
    return follow_llm(balance_llm(work, plan=plan), work, plan=plan)


def balance_whole_samples(work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance the samples' total work in all units over replicas and microbatches; samples stay whole, with their items.

    Like `balance_llm_only`, but a sample weighs the FLOPs of all its parts, for units that share lanes or form one interleaved
    chain. Declared costs of units do not count here, since they are not comparable.
    """
    return follow_llm(_balance_samples(work, work.whole_sample_amounts(), LINEAR_COST, plan=plan), work, plan=plan)


def balance_every_unit(work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance every unit's work over its own replicas (OrchMLLM's post-balancing), and inside each over its microbatches.

    An encoder's items (or the items of a sample together, by `options.granularity`) are balanced over its own replicas by their
    own work, wherever their samples are: its output goes straight to its consumer (OrchMLLM's composed rearrangements).
    """
    return place_every_unit(balance_llm(work, plan=plan), work, plan=plan)


def balance_llm(work: BatchWork, *, plan: Plan) -> Groups:
    """Balance the LLM's work over its replicas, then over their microbatches."""
    backbone = work.graph.backbone.name
    return _balance_samples(work, work.amounts(backbone), work.cost(backbone), plan=plan)


def _balance_samples(work: BatchWork, amounts: Integers, cost: LengthCost, *, plan: Plan) -> Groups:
    """Balance samples over the LLM's replicas, then over equally many microbatches in each (fewer if samples are few).

    Replicas that share experts compute microbatch by microbatch: there all are made at once, and those of one number are alike.
    """
    llm = plan.units[work.graph.backbone.name]
    num_replicas, samples = llm.data_parallel_size, np.arange(len(amounts))
    wanted = work.count_microbatches(num_replicas)
    if llm.expert_parallel_size > 1:
        count = min(wanted, -(-len(amounts) // num_replicas))
        bins = post_balance(amounts, num_bins=min(num_replicas * count, len(amounts)), cost=cost).astype(np.int64)
        heaviest_first = np.argsort(np.argsort(-sum_by(bins, amounts), kind="stable"))
        rounds, turns = np.divmod(heaviest_first[bins], num_replicas)
        microbatches = np.where(rounds % 2, num_replicas - 1 - turns, turns) * count + rounds  # every second round backwards
    else:
        replicas = post_balance(amounts, num_bins=num_replicas, cost=cost).astype(np.int64)
        starts, samples = group_rows(replicas, samples, num_replicas)
        count = min(wanted, int(np.diff(starts).max()))
        bins = np.zeros(len(samples), np.int64)
        for first, last in pairwise(starts.tolist()):
            if first < last:
                bins[first:last] = post_balance(amounts[samples[first:last]], num_bins=min(count, last - first), cost=cost)
        microbatches = row_numbers(starts) * count + bins
    return Groups.of_rounds(samples, microbatches, num_rounds=count, num_replicas=num_replicas)
