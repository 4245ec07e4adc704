"""Distributes a replica's samples over encoder microbatches greedily (Entrain 4.5.1)."""

from collections.abc import Iterable, Sequence


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
