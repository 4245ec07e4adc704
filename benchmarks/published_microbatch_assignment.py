"""DistTrain's reordering and Entrain's assignment as the papers list them: peers for `microbatch_assignment.py`, not for use.

Samples are indices into lists of loads. Where a listing cannot run as printed, it is completed with as little as possible, and
the docstring says with what.
"""

from collections.abc import Sequence

from benchmarks.reordering_steps import interval_to_fill
from multimodal.balance.algorithms.reorder_microbatches import pipeline_steps

Groups = list[list[int]]

TABLE_UNITS = 1000
"""Units per mean microbatch to which Entrain rounds LLM loads for its subset sums."""


def published_intra_reordering(sizes: Sequence[float], *, num_groups: int) -> Groups:
    """Run DistTrain's Alg. 2: by ascending size, each sample goes to the group that has the least."""
    groups: Groups = [[] for _ in range(num_groups)]
    for sample in sorted(range(len(sizes)), key=lambda each: sizes[each]):
        lightest = min(range(num_groups), key=lambda group: sum(sizes[member] for member in groups[group]))
        groups[lightest].append(sample)
    return groups


def published_inter_reordering(forward: Sequence[Sequence[float]], *, backward: Sequence[Sequence[float]]) -> list[int]:
    """Run DistTrain's Alg. 3 for 1F1B: from [stages][microbatches] to the order.

    Filled in: the loop ends when no microbatch is left (the listing needs num_stages - 2 more than there are); the first
    interval, for which microbatches are not known yet, is computed with their mean; its microbatches are picked one by one.
    """
    num_stages, num_microbatches = len(forward), len(forward[0])
    forward, backward = ([[*row, sum(row) / len(row)] for row in table] for table in (forward, backward))
    steps = pipeline_steps(num_stages, 1, num_microbatches)
    sizes = [sum(row[each] for row in (*forward, *backward)) for each in range(num_microbatches)]
    by_size = sorted(range(num_microbatches), key=lambda each: sizes[each])
    order, rear, pending = [by_size[0]], by_size[1:num_stages], by_size[num_stages:]
    while pending:
        interval = interval_to_fill(order, steps=steps, num_stages=num_stages, forward=forward, backward=backward)
        closest = min(pending, key=lambda each: abs(forward[0][each] - interval))
        pending.remove(closest)
        order.append(closest)
    return order + rear


def published_entrain(
    llm: Sequence[float], *, encoder: Sequence[float], num_replicas: int, num_microbatches: int
) -> list[tuple[Groups, Groups]]:
    """Run Entrain's Alg. 4: returns the encoder microbatches and the LLM microbatches of each replica.

    Filled in: high LLM load is above the replica's mean.
    """
    replicas: Groups = [[] for _ in range(num_replicas)]
    for sample in sorted(range(len(llm)), key=lambda each: -encoder[each]):
        min(replicas, key=lambda members: sum(llm[member] for member in members)).append(sample)
    return [_hierarchical(llm, encoder, members, num_microbatches) for members in replicas]


def _hierarchical(
    llm: Sequence[float], encoder: Sequence[float], members: Sequence[int], num_microbatches: int
) -> tuple[Groups, Groups]:
    heaviest = max(encoder[sample] for sample in members)
    count = min(num_microbatches, int(sum(encoder[sample] for sample in members) / heaviest)) if heaviest else num_microbatches
    mean = sum(llm[sample] for sample in members) / len(members)
    coarse = [sample for sample in members if llm[sample] > mean]
    fine = [sample for sample in members if llm[sample] <= mean]
    groups: Groups = [[] for _ in range(count)]
    for stratum in (coarse, fine):
        for sample in sorted(stratum, key=lambda each: -encoder[each]):
            min(groups, key=lambda group: sum(encoder[member] for member in group)).append(sample)
    groups.sort(key=lambda group: -sum(llm[sample] for sample in group))
    return _defer(llm, groups, unit=sum(llm[sample] for sample in members) / count / TABLE_UNITS)


def _defer(llm: Sequence[float], groups: Groups, *, unit: float) -> tuple[Groups, Groups]:
    loads = [sum(llm[sample] for sample in group) for group in groups]
    half = len(groups) // 2
    over, under = range(half), range(half, len(groups))
    deferred = {(i, j): _closest_subset(llm, groups[i], (loads[i] - loads[j]) / 2, unit) for i in over for j in under}
    bottleneck = {}
    for (i, j), subset in deferred.items():
        moved = sum(llm[sample] for sample in subset)
        bottleneck[i, j] = max(loads[i] - moved, loads[j] + moved)
    partners, threshold = _match(bottleneck, loads, over, under)
    free = [j for j in under if j not in partners.values()]
    encoders, llms = [], []
    for i in over:
        is_critical = loads[i] > threshold
        j = partners[i] if is_critical else free.pop(0)
        subset = set(deferred[i, j]) if is_critical else set()
        encoders += [groups[i], groups[j]]
        llms += [[sample for sample in groups[i] if sample not in subset], [*subset, *groups[j]]]
    return encoders + [groups[j] for j in free], llms + [groups[j] for j in free]


def _closest_subset(llm: Sequence[float], group: Sequence[int], target: float, unit: float) -> list[int]:
    """Return the subset whose rounded sum, in a table of all rounded sums, is closest to the target."""
    table: dict[int, list[int]] = {0: []}
    for sample in group:
        load = round(llm[sample] / unit)
        table |= {total + load: [*subset, sample] for total, subset in table.items() if total + load not in table}
    return table[min(table, key=lambda total: abs(total - target / unit))]


def _match(
    bottleneck: dict[tuple[int, int], float], loads: Sequence[float], over: range, under: range
) -> tuple[dict[int, int], float]:
    """Return the partners of critical microbatches at the least feasible threshold."""
    candidates = sorted({*bottleneck.values(), *(loads[i] for i in over), loads[-1]})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _partners(bottleneck, loads, over, under, candidates[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return _partners(bottleneck, loads, over, under, candidates[low]) or {}, candidates[low]


def _partners(
    bottleneck: dict[tuple[int, int], float], loads: Sequence[float], over: range, under: range, threshold: float
) -> dict[int, int] | None:
    taken: dict[int, int] = {}

    def augment(i: int, seen: set[int]) -> bool:
        for j in under:
            if bottleneck[i, j] <= threshold and j not in seen:
                seen.add(j)
                if j not in taken or augment(taken[j], seen):
                    taken[j] = i
                    return True
        return False

    if not all(augment(i, set()) for i in over if loads[i] > threshold):
        return None
    return {i: j for j, i in taken.items()}
