"""Which microbatch encodes which sample of a replica: even encoder loads, and fine-grained samples everywhere (Entrain 4.5.1)."""

from collections.abc import Sequence

from multimodal.balance.replica_assignment import dominant_shares, largest_share, sum_in_order


def effective_num_microbatches(
    encoders: Sequence[Sequence[float]], *, members: Sequence[int], num_microbatches: int, min_num_microbatches: int = 1
) -> int:
    """Return Entrain's K_eff: as many microbatches as can all have the encoder load of the heaviest sample, at most those wanted.

    K_eff = min(K, floor(sum of encoder loads / largest encoder load)); of several encoders, the one that allows most decides, so
    that a rare modality does not take the others' microbatches away. Where no sample has encoder work, K. In any case at
    least `min_num_microbatches` (a pipeline that is to be full needs as many as it has stages), and at most one per sample.
    """
    allowed = 0
    for loads in encoders:
        largest = max(loads[sample] for sample in members)
        if largest > 0:
            # Compared before it is converted: the quotient of a tiny load may not fit an integer.
            quotient = sum_in_order(loads, members) / largest
            allowed = max(allowed, num_microbatches if quotient >= num_microbatches else int(quotient))
    return min(max(allowed or num_microbatches, min_num_microbatches), num_microbatches, len(members))


def stratify(
    llm: Sequence[float], *, encoders: Sequence[Sequence[float]], members: Sequence[int], num_microbatches: int
) -> list[int]:
    """Return the encoder microbatch of every member of a replica, in the members' order.

    The members with encoder work are parted into a coarse-grained half (high LLM load) and a fine-grained half; first the
    coarse ones, then the fine ones go, by descending encoder load, each to the microbatch that has the least. So both halves
    are spread evenly, and deferral later finds small LLM loads to move in every microbatch. Of several encoders, a sample goes to
    where the largest load of an encoder that it needs (relative to that encoder's total) is then least; merging the
    encoders, as the paper does, is a matter of handing in the sum of their loads.

    Samples without encoder work do not matter to the encoders, but the greedy rule would put all of them into one microbatch.
    They go last, by descending LLM load, each to the microbatch with the least LLM load.

    `num_microbatches` is at most the number of members; none stays empty. Ties go by LLM load, then by index. O(n log n + n K).
    """
    shares = dominant_shares(encoders, members=members)
    totals = [sum_in_order(loads, members) for loads in encoders]
    load = [[0.0] * num_microbatches for _ in encoders]
    llm_load, count = [0.0] * num_microbatches, [0] * num_microbatches
    microbatches = [0] * len(members)

    def place(position: int) -> None:
        sample = members[position]

        def rank(index: int) -> tuple[bool, float, float, int]:
            largest = largest_share(encoders, totals, load, sample=sample, index=index)
            return count[index] > 0, largest, llm_load[index], index

        best = min(range(num_microbatches), key=rank)
        for of_encoder, loads in zip(load, encoders, strict=True):
            of_encoder[best] += loads[sample]
        llm_load[best] += llm[sample]
        count[best] += 1
        microbatches[position] = best

    for stratum in _strata(llm, members, shares, num_microbatches):
        for position in stratum:
            place(position)
    return microbatches


def _strata(llm: Sequence[float], members: Sequence[int], shares: Sequence[float], num_microbatches: int) -> list[list[int]]:
    """Positions of the coarse-grained, the fine-grained, and the samples without encoder work, each in order of placement."""
    by_llm_load = sorted(range(len(members)), key=lambda each: (-llm[members[each]], each))
    encoded = [position for position in by_llm_load if shares[position] > 0]
    num_coarse = min(len(encoded) // 2, max(0, len(encoded) - num_microbatches))
    strata = [sorted(part, key=lambda each: (-shares[each], each)) for part in (encoded[:num_coarse], encoded[num_coarse:])]
    return [*strata, [position for position in by_llm_load if shares[position] <= 0]]
