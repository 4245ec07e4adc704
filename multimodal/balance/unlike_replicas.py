"""Places a global batch on replicas that are not alike: each gets microbatches, and work, in proportion to its speed."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from multimodal.balance.batch_work import BatchWork
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan


def has_unequal_shares(graph: ModelGraph, plan: Plan) -> bool:
    """Return True if replicas take unequal shares of a batch: those of a unit differ, or the plan sets shares for the LLM."""
    return plan.has_unlike_replicas or bool(plan.units[graph.backbone.name].microbatch_shares)


def shares_of(graph: ModelGraph, plan: Plan, unit: str) -> tuple[int, ...]:
    """Return the share of a batch that each replica of a unit takes: the plan's, or its number of ranks."""
    held, llm = plan.units[unit], plan.units[graph.backbone.name]
    if not held.microbatch_shares:
        return tuple(len(replica.ranks) for replica in held.replicas)
    if unit == graph.backbone.name:
        return held.microbatch_shares
    return tuple(share for share in held.microbatch_shares for _ in llm.replicas)


def balance_unlike(work: BatchWork, *, plan: Plan, balance: Callable[..., Assignment]) -> Assignment:
    """Place every sample, and its items, on replicas of all units, in proportion to `shares_of`.

    The balancer makes all microbatches as for a single replica. The heaviest ones are dealt first, each to the LLM replica whose
    work per microbatch of its share stays least. A unit with as many replicas as the LLM follows it; the microbatches of others
    are dealt likewise, by their number. balance: a `Balancer` that keeps samples whole. With fewer samples than microbatches,
    replicas get fewer. O(samples + microbatches x replicas).
    """
    graph, options = work.graph, work.options
    shares = shares_of(graph, plan, graph.backbone.name)
    count = work.count_microbatches(1) if options.num_microbatches is None else options.num_microbatches * len(shares)
    counts = share_microbatches(max(count, len(shares)), shares)
    alone = replace(options, num_microbatches=sum(counts), tokens_per_microbatch=None, predictor=None)
    one_replica = {unit.name: UnitPlan((Replica((Stage((0,), ((0, len(unit.layers)),)),)),)) for unit in graph.units}
    whole = balance(replace(work, options=alone), plan=Plan(one_replica))
    microbatches = whole.units[graph.backbone.name][0]
    of_sample = {atom.sample_id: index for index, microbatch in enumerate(microbatches) for atom in microbatch}
    flops = dict(zip(work.arrays.sample_ids.tolist(), work.whole_sample_flops().tolist(), strict=True))
    owners = _deal([sum(flops[atom.sample_id] for atom in microbatch) for microbatch in microbatches], counts)
    placed = {}
    for name, (own,) in whole.units.items():
        own_shares = shares_of(graph, plan, name)
        owners_here = [owners[of_sample[microbatch[0].sample_id]] for microbatch in own]
        if len(own_shares) != len(shares):
            owners_here = _deal([1.0] * len(own), share_microbatches(len(own), own_shares))
        placed[name] = tuple(
            tuple(microbatch for microbatch, owner in zip(own, owners_here, strict=True) if owner == replica)
            for replica in range(len(own_shares))
        )
    return Assignment(placed)


def share_microbatches(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Return each replica's number of microbatches by its share, one at least if possible; largest remainders round up."""
    total = sum(shares)
    counts = [count * share // total for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda each: (-(count * shares[each] % total), each))
    for each in by_rest[: count - sum(counts)]:
        counts[each] += 1
    while count >= len(shares) and min(counts) == 0:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)


def _deal(work: Sequence[float], shares: Sequence[int]) -> list[int]:
    """Return the replica of each microbatch."""
    owners, counts, loads = [0] * len(work), [0] * len(shares), [0.0] * len(shares)
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        open_ones = (each for each in range(len(shares)) if counts[each] < shares[each])
        owner = min(open_ones, key=lambda each: ((loads[each] + work[index]) / shares[each], each))
        owners[index], counts[owner], loads[owner] = owner, counts[owner] + 1, loads[owner] + work[index]
    return owners
