"""The greedy assignment, and pairs of its microbatches, in which LLM work moves from the first to the second (Entrain 4.5.2)."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np


@dataclass(frozen=True, slots=True)
class Deferral:
    """The microbatches of one replica in pairs, and the samples whose LLM part moves from the first to the second."""

    pairs: list[list[int]]
    """An overloaded microbatch and the underloaded one that follows it; with an odd number, one has no partner."""
    deferred: list[tuple[int, int]]
    """(sample, microbatch that its LLM part moves to); microbatches are numbered as in `pairs`."""


def defer_pairwise(llm: Sequence[float], *, microbatches: Sequence[Sequence[int]], max_subset_sums: int) -> Deferral:
    """Pair every overloaded microbatch with an underloaded one that follows it and takes some of its samples' LLM parts.

    Microbatches are sorted by LLM load; the upper half is overloaded (S_ol), the lower half underloaded (S_ul). For every
    pair (i, j) the samples of i are found whose loads add up closest to (w_i - w_j) / 2 (perhaps none); V_ij is the larger of the
    two loads after that. A matching of S_ol with S_ul is chosen whose largest V_ij is least (the paper's T*) and, since many do
    that, whose loads deviate least from the mean, in squares. Pairs below T* also defer if that evens them out. With an odd
    number of microbatches the median counts as underloaded, and one without a partner comes last.

    llm: [num_samples]; microbatches: the samples of each, none empty, also after deferral. Equal microbatches go by index.
    O(K^2 log(max_subset_sums) + n x max_subset_sums + K^3 log K) for K microbatches of n samples.
    """
    num_microbatches = len(microbatches)
    load = [sum_in_order(llm, members) for members in microbatches]
    by_load = sort_descending(load)
    overloaded, underloaded = by_load[: num_microbatches // 2], by_load[num_microbatches // 2 :]
    mean = sum_in_order(load, range(num_microbatches)) / num_microbatches
    candidates = [sorted((s for s in microbatches[i] if llm[s] > 0), key=lambda s: (-llm[s], s)) for i in overloaded]
    sums: list[SubsetSums] = []
    chosen: list[list[int]] = []
    bottlenecks: list[list[float]] = []
    costs: list[list[float]] = []
    for row, i in enumerate(overloaded):
        # A sum beyond w_i - w_j is no better than deferring nothing, for any partner j.
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
    """Return the squared deviation relative to the mean, so that no load overflows; 0 if all loads are 0."""
    if mean <= 0:
        return 0.0
    deviation = load / mean - 1.0
    return deviation * deviation


def order_pairs(pairs: Sequence[Sequence[int]], *, work: Sequence[float]) -> list[int]:
    """Return the microbatches of all pairs in the order of execution; those of a pair follow each other.

    Entrain leaves the order of pairs open. The lightest pair comes first, so that all stages start soon, and the second lightest
    last, since nothing fills the waits for the last backwards (DistTrain 5.2); work rises towards the middle. work: per
    microbatch, encoders and LLM together. Equal pairs are ordered by index. O(pairs log pairs).
    """
    totals = [sum_in_order(work, pair) for pair in pairs]
    rising = sorted(range(len(pairs)), key=totals.__getitem__)
    return [microbatch for pair in (*rising[::2], *reversed(rising[1::2])) for microbatch in pairs[pair]]


class SubsetSums:
    """The reachable sums up to a limit, by dynamic programming over the loads.

    A sorted list of true sums, instead of Entrain's table over rounded ones (4.5.2), which serves all partners of a microbatch;
    once there are more than `max_sums`, only one per cell of `limit / max_sums` is kept (trimming; Ibarra and Kim 1975).
    O(loads x max_sums).
    """

    def __init__(self, loads: Sequence[float], *, limit: float, max_sums: int) -> None:
        self._sum, self._before, self._item = [0.0], [-1], [-1]
        self._nodes = [0]
        for item, load in enumerate(loads):
            # Of equal sums the one without this load is kept.
            old = [(self._sum[node], node, False) for node in self._nodes]
            new = [(total + load, node, True) for total, node, _ in old if total + load <= limit]
            merged = sorted(old + new, key=lambda entry: (entry[0], entry[2]))
            sums = [entry for index, entry in enumerate(merged) if index == 0 or entry[0] != merged[index - 1][0]]
            if len(sums) > max_sums:
                width = limit / max_sums
                cells = [int(total / width) for total, _, _ in sums]
                sums = [entry for index, entry in enumerate(sums) if index == 0 or cells[index] != cells[index - 1]]
            self._nodes = [self._append(total, node, item) if is_new else node for total, node, is_new in sums]

    def _append(self, total: float, before: int, item: int) -> int:
        self._sum.append(total)
        self._before.append(before)
        self._item.append(item)
        return len(self._sum) - 1

    def closest(self, target: float) -> int:
        """Return the subset whose sum is closest to the target; of two equally close sums, the smaller one."""
        index = bisect_left(self._nodes, target, key=self._sum.__getitem__)
        if index == len(self._nodes):
            return self._nodes[-1]
        if index > 0 and target - self._sum[self._nodes[index - 1]] <= self._sum[self._nodes[index]] - target:
            return self._nodes[index - 1]
        return self._nodes[index]

    def sum_of(self, subset: int) -> float:
        """Return the sum of a subset."""
        return self._sum[subset]

    def items_of(self, subset: int) -> list[int]:
        """Return the indices of a subset's loads, the last first."""
        items = []
        while subset > 0:
            items.append(self._item[subset])
            subset = self._before[subset]
        return items


Matrix = Sequence[Sequence[float]]


def match_bottleneck(bottlenecks: Matrix, *, costs: Matrix) -> list[int]:
    """Return the column of every row; of equally good ones the first.

    bottlenecks, costs: [rows][columns], finite, with at least as many columns as rows. First the least T is found for which a
    matching exists whose bottlenecks are all <= T (Entrain 4.5.2), then the matching of least total cost within it (shortest
    augmenting paths, as in scipy.optimize.linear_sum_assignment). O(rows^2 x columns x log(entries)) and O(rows^2 x columns).
    """
    if not bottlenecks:
        return []
    threshold = least_bottleneck(bottlenecks)
    allowed = [
        [cost if bottleneck <= threshold else inf for cost, bottleneck in zip(*rows, strict=True)]
        for rows in zip(costs, bottlenecks, strict=True)
    ]
    return _least_cost_matching(allowed)


def least_bottleneck(bottlenecks: Matrix) -> float:
    """Return the least T for which every row can have a column of its own with an entry <= T (binary search)."""
    from scipy.sparse import csr_matrix  # loaded when first used
    from scipy.sparse.csgraph import maximum_bipartite_matching

    entries = np.array(bottlenecks)
    candidates: list[float] = np.unique(entries).tolist()

    def suffices(threshold: float) -> bool:
        return bool(maximum_bipartite_matching(csr_matrix(entries <= threshold), perm_type="column").min() >= 0)

    return candidates[bisect_left(candidates, True, key=suffices)]


def _least_cost_matching(costs: Matrix) -> list[int]:
    """Match every row; `costs` may hold infinite entries as long as a finite matching exists."""
    num_columns = len(costs[0])
    row_price, column_price = [0.0] * len(costs), [0.0] * num_columns
    row_of_column, column_of_row = [-1] * num_columns, [-1] * len(costs)
    for free_row in range(len(costs)):
        distance, before = [inf] * num_columns, [-1] * num_columns
        done: list[int] = []
        is_done = [False] * num_columns
        row, reached = free_row, 0.0
        while True:
            for column in range(num_columns):
                if not is_done[column]:
                    candidate = reached + costs[row][column] - row_price[row] - column_price[column]
                    if candidate < distance[column]:
                        distance[column], before[column] = candidate, row
            nearest = min((column for column in range(num_columns) if not is_done[column]), key=distance.__getitem__)
            reached = distance[nearest]
            is_done[nearest] = True
            done.append(nearest)
            if row_of_column[nearest] < 0:
                break
            row = row_of_column[nearest]
        row_price[free_row] += reached
        for column in done[:-1]:
            row_price[row_of_column[column]] += reached - distance[column]
            column_price[column] -= reached - distance[column]
        column = done[-1]
        while True:
            row = before[column]
            row_of_column[column] = row
            column_of_row[row], column = column, column_of_row[row]
            if row == free_row:
                break
    return column_of_row


def sum_in_order(loads: Sequence[float], members: Iterable[int]) -> float:
    """Return the sum over the members, added from first to last, as the kernel does, to the last bit."""
    total = 0.0
    for sample in members:
        total += loads[sample]
    return total


def sort_descending(values: Sequence[float]) -> list[int]:
    """Return the indices of the values, largest first; equal values by index."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)


def dominant_shares(units: Sequence[Sequence[float]], *, members: Sequence[int]) -> list[float]:
    """Return each member's largest share of a unit's total over the members, or 0; units: [num_units][num_samples] loads."""
    shares = [0.0] * len(members)
    for loads in units:
        total = sum_in_order(loads, members)
        if total > 0:
            shares = [max(share, loads[sample] / total) for share, sample in zip(shares, members, strict=True)]
    return shares


def effective_num_microbatches(
    encoders: Sequence[Sequence[float]], *, members: Sequence[int], num_microbatches: int, min_num_microbatches: int = 1
) -> int:
    """Return Entrain's K_eff: the most microbatches that can all have the heaviest sample's encoder load, up to the given number.

    K_eff = min(K, floor(sum of encoder loads / largest encoder load)) of the encoder that allows most, or K without encoder work;
    at least `min_num_microbatches`, and at most one per sample.
    """
    allowed = 0
    for loads in encoders:
        largest = max(loads[sample] for sample in members)
        if largest > 0:
            # Compared before the conversion: the quotient of a tiny load may not fit an integer.
            quotient = sum_in_order(loads, members) / largest
            allowed = max(allowed, num_microbatches if quotient >= num_microbatches else int(quotient))
    return min(max(allowed or num_microbatches, min_num_microbatches), num_microbatches, len(members))


def stratify(
    llm: Sequence[float], *, encoders: Sequence[Sequence[float]], members: Sequence[int], num_microbatches: int
) -> list[int]:
    """Return the encoder microbatch of every member of a replica, in the members' order.

    The members with encoder work are divided into a coarse-grained half (high LLM load) and a fine-grained half. First the coarse
    ones, then the fine ones go, by descending encoder load, each to the microbatch with the least load, so deferral later finds
    small LLM loads to move in every microbatch. With several encoders, a sample goes where the largest load of an encoder that it
    needs (relative to that encoder's total) is then least. Samples without encoder work come last, by descending LLM load, each
    to the microbatch with the least LLM load. No microbatch stays empty. Ties: LLM load, then index. O(n log n + n K).
    """
    shares = dominant_shares(encoders, members=members)
    by_llm_load = sort_descending([llm[sample] for sample in members])
    encoded = [position for position in by_llm_load if shares[position] > 0]
    num_coarse = min(len(encoded) // 2, max(0, len(encoded) - num_microbatches))
    order = [position for position in by_llm_load if shares[position] <= 0]
    for stratum in (encoded[num_coarse:], encoded[:num_coarse]):
        order = sorted(stratum, key=lambda position: (-shares[position], position)) + order
    bins = _spread([members[at] for at in order], units=encoders, members=members, weights=llm, num_bins=num_microbatches)
    microbatches = [0] * len(members)
    for position, microbatch in zip(order, bins, strict=True):
        microbatches[position] = microbatch
    return microbatches


def _spread(
    samples: Sequence[int], *, units: Sequence[Sequence[float]], members: Sequence[int], weights: Sequence[float], num_bins: int
) -> list[int]:
    """Return the bin of each of these samples, which go one after the other where the largest load is then least.

    Of the units that a sample needs, relative to their totals over the members. Empty bins come first; ties go to the least sum
    of weights, then to the lower index.
    """
    totals = [sum_in_order(loads, members) for loads in units]
    load = [[0.0] * num_bins for _ in units]
    weight, count, bins = [0.0] * num_bins, [0] * num_bins, []
    for sample in samples:
        needed = [(loads[sample], total, bin_loads) for loads, total, bin_loads in zip(units, totals, load, strict=True)]
        needed = [unit for unit in needed if unit[0] > 0]

        def rank(index: int, needed: Sequence[tuple[float, float, list[float]]] = needed) -> tuple[bool, float, float]:
            largest = max(((bin_loads[index] + sample_load) / total for sample_load, total, bin_loads in needed), default=0.0)
            return count[index] > 0, largest, weight[index]

        best = min(range(num_bins), key=rank)
        for sample_load, _, bin_loads in needed:
            bin_loads[best] += sample_load
        weight[best] += weights[sample]
        count[best] += 1
        bins.append(best)
    return bins
