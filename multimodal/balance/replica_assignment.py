"""Which replica gets which sample, so that neither the encoders nor the LLM of any replica have much more to do (Entrain 4.3)."""

from collections.abc import Iterable, Sequence


def dominant_shares(units: Sequence[Sequence[float]], *, members: Sequence[int]) -> list[float]:
    """Return, for each member, the largest share that it has in any unit's total over the members; 0 where it has no load.

    units: [num_units][num_samples] loads. O(units x members).
    """
    shares = [0.0] * len(members)
    for loads in units:
        total = 0.0
        for sample in members:
            total += loads[sample]
        if total > 0:
            for position, sample in enumerate(members):
                shares[position] = max(shares[position], loads[sample] / total)
    return shares


def assign_replicas(llm: Sequence[float], *, encoders: Sequence[Sequence[float]], num_replicas: int) -> list[int]:
    """Return the replica of every sample.

    Two greedy rules are tried. Entrain's: by encoder load in descending order, each sample to the replica with the least LLM
    load; encoder loads spread because the heavy samples come first, but nothing balances them. And one for all units at once:
    by the largest share that a sample has in any unit's total in descending order, each sample to where the largest of its
    units' loads (relative to the unit's total) is then least. Kept is the one whose most loaded (replica, unit) is lighter,
    relative to the unit's total; Entrain's if they are alike.

    llm: [num_samples]; encoders: [num_encoders][num_samples]. Samples stand in the order of their ids, which breaks ties; equal
    replicas go by index. No replica stays empty that a sample could fill. O(n log n + n x replicas x units).
    """
    everyone = range(len(llm))
    units = [llm, *encoders]
    published = _assign_by_llm_load(llm, encoders, num_replicas)
    joint = _assign_jointly(units, num_replicas)
    heaviest = [_heaviest_share(units, replicas, num_replicas, everyone) for replicas in (published, joint)]
    return joint if heaviest[1] < heaviest[0] else published


def _assign_by_llm_load(llm: Sequence[float], encoders: Sequence[Sequence[float]], num_replicas: int) -> list[int]:
    shares = dominant_shares(encoders, members=range(len(llm)))
    llm_load, encoder_share, count = [0.0] * num_replicas, [0.0] * num_replicas, [0] * num_replicas
    replicas = [0] * len(llm)
    for sample in sorted(range(len(llm)), key=lambda each: (-shares[each], each)):
        best = min(range(num_replicas), key=lambda each: (llm_load[each], encoder_share[each], count[each], each))
        llm_load[best] += llm[sample]
        encoder_share[best] += shares[sample]
        count[best] += 1
        replicas[sample] = best
    return replicas


def _assign_jointly(units: Sequence[Sequence[float]], num_replicas: int) -> list[int]:
    everyone = range(len(units[0]))
    shares = dominant_shares(units, members=everyone)
    totals = [sum_in_order(loads, everyone) for loads in units]
    load = [[0.0] * num_replicas for _ in units]
    share, count = [0.0] * num_replicas, [0] * num_replicas
    replicas = [0] * len(everyone)
    for sample in sorted(everyone, key=lambda each: (-shares[each], each)):

        def rank(replica: int, sample: int = sample) -> tuple[bool, float, float, int, int]:
            largest = largest_share(units, totals, load, sample=sample, index=replica)
            return count[replica] > 0, largest, share[replica], count[replica], replica

        best = min(range(num_replicas), key=rank)
        for of_unit, loads in zip(load, units, strict=True):
            of_unit[best] += loads[sample]
        share[best] += shares[sample]
        count[best] += 1
        replicas[sample] = best
    return replicas


def largest_share(
    units: Sequence[Sequence[float]], totals: Sequence[float], load: Sequence[Sequence[float]], *, sample: int, index: int
) -> float:
    """Return the largest share of a unit's total that a sample leads to in a bin, over the units that the sample needs."""
    largest = 0.0
    for loads, total, of_unit in zip(units, totals, load, strict=True):
        if loads[sample] > 0:
            largest = max(largest, (of_unit[index] + loads[sample]) / total)
    return largest


def sum_in_order(loads: Sequence[float], members: Iterable[int]) -> float:
    """Return the sum over the members, added from first to last (the kernel's result, to the last bit)."""
    total = 0.0
    for sample in members:
        total += loads[sample]
    return total


def _heaviest_share(
    units: Sequence[Sequence[float]], replicas: Sequence[int], num_replicas: int, everyone: Iterable[int]
) -> float:
    heaviest = 0.0
    for loads in units:
        total, of_replica = 0.0, [0.0] * num_replicas
        for sample in everyone:
            total += loads[sample]
            of_replica[replicas[sample]] += loads[sample]
        if total > 0:
            heaviest = max(heaviest, max(of_replica) / total)
    return heaviest
