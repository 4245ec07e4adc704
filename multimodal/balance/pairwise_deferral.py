"""Which microbatches run as a pair, and which samples the second one takes over in the LLM (Entrain 4.5.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from multimodal.balance.bottleneck_matching import match_bottleneck
from multimodal.balance.replica_assignment import sum_in_order
from multimodal.balance.subset_sums import SubsetSums


@dataclass(frozen=True, slots=True)
class Deferral:
    """The microbatches of one replica in pairs, and what moves inside them."""

    pairs: list[list[int]]
    """An overloaded microbatch and the underloaded one that follows it; of an odd number, one has no partner."""
    deferred: list[tuple[int, int]]
    """(sample, microbatch that its LLM part moves to), the latter numbered as in `pairs`."""


def defer_pairwise(llm: Sequence[float], *, microbatches: Sequence[Sequence[int]], max_subset_sums: int) -> Deferral:
    """Pair every overloaded microbatch with an underloaded one that follows it and takes some of its samples' LLM parts.

    Microbatches are sorted by LLM load; the upper half is overloaded (S_ol), the lower half underloaded (S_ul). For every
    pair (i, j) the samples of i are found whose loads add up closest to (w_i - w_j) / 2; V_ij is the larger of the two loads
    after that. A matching of S_ol with S_ul is chosen whose largest V_ij is least (the paper's T*) and, since many do that,
    whose loads deviate least from the mean, in squares.

    Where the paper's listing leaves things open: deferring nothing is one of the subsets, so V_ij <= w_i = L_i; the paper's
    vector L (microbatches that run alone) then decides nothing, and every row can be matched. Pairs below T* defer, too, where
    it evens them out. Of an odd number of microbatches the median counts as underloaded. Pairs are listed by the load of
    their first one, heaviest first, and the microbatch without a partner last; `order_pairs` says in which order they run.

    llm: [num_samples]; microbatches: the samples of each, none empty. Deferral never empties a microbatch. Equal microbatches go
    by index. O(K^2 log(max_subset_sums) + n x max_subset_sums + K^3 log K) for K microbatches of n samples.
    """
    num_microbatches = len(microbatches)
    load = [sum_in_order(llm, members) for members in microbatches]
    by_load = sorted(range(num_microbatches), key=lambda each: (-load[each], each))
    overloaded, underloaded = by_load[: num_microbatches // 2], by_load[num_microbatches // 2 :]
    mean = sum_in_order(load, range(num_microbatches)) / num_microbatches
    candidates = [sorted((s for s in microbatches[i] if llm[s] > 0), key=lambda s: (-llm[s], s)) for i in overloaded]
    sums: list[SubsetSums] = []
    chosen: list[list[int]] = []
    bottlenecks: list[list[float]] = []
    costs: list[list[float]] = []
    for row, i in enumerate(overloaded):
        # A sum beyond w_i - w_j is no better than none, for no partner.
        limit = load[i] - load[by_load[-1]]
        sums.append(SubsetSums([llm[s] for s in candidates[row]], limit=limit, max_sums=max_subset_sums))
        chosen.append([sums[row].closest((load[i] - load[j]) / 2) for j in underloaded])
        moved = [sums[row].sum_of(subset) for subset in chosen[row]]
        after = [(load[i] - amount, load[j] + amount) for amount, j in zip(moved, underloaded, strict=True)]
        bottlenecks.append([max(pair) for pair in after])
        costs.append([_squared_deviation(pair[0], mean) + _squared_deviation(pair[1], mean) for pair in after])
    partners = match_bottleneck(bottlenecks, costs=costs)
    pairs = [[i, underloaded[partners[row]]] for row, i in enumerate(overloaded)]
    pairs += [[j] for column, j in enumerate(underloaded) if column not in partners]
    deferred = [
        (candidates[row][item], underloaded[column])
        for row, column in enumerate(partners)
        for item in sums[row].items_of(chosen[row][column])
    ]
    return Deferral(pairs, deferred)


def _squared_deviation(load: float, mean: float) -> float:
    """Relative to the mean, so that no load overflows; 0 where all loads are."""
    if mean <= 0:
        return 0.0
    deviation = load / mean - 1.0
    return deviation * deviation
