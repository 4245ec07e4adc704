"""Assigns samples to replicas by Entrain's rule (4.3) or by one rule for all units together, then exchanges samples."""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from multimodal.balance.algorithms.greedy_assignment import dominant_shares, sort_descending, sum_in_order

Units = Sequence[Sequence[float]]
"""[num_units][num_samples] loads."""

EVEN_ENOUGH = 1.001
"""A heaviest replica with at most this pressure is not relieved further."""
STEPS_PER_SAMPLE = 128
LEAST_STEPS = 2**14
"""Budget of the exchanges, in examined pairs of samples: a millisecond of the C++ kernel for some thousand samples."""


def assign_replicas(llm: Sequence[float], *, encoders: Units, num_replicas: int) -> list[int]:
    """Return the replica of every sample, so that no replica has much more encoder or LLM work than necessary.

    The heaviest replica has at least the mean of a unit's work, and at least the largest sample. The *pressure* of a load is its
    ratio to the larger of the two; that of a replica is the largest of its units'. Two greedy rules are tried. Entrain's rule: by
    encoder load in descending order, each sample to the replica with the least LLM load; encoder loads spread because the heavy
    samples come first, but nothing balances them. The rule for all units together: by pressure in descending order, each sample
    to the replica where the pressure of the units that it needs is then least (longest first, if there is one unit). The rule
    whose heaviest replica has less pressure is taken, Entrain's if they are equal; then samples are exchanged
    (`exchange_samples`).

    Relative to the mean alone, one sample above the mean in one unit would hide the imbalance of the other units.

    llm: [num_samples]; encoders: [num_encoders][num_samples]; equal samples, and equal replicas, are ordered by index. No replica
    stays empty if there is a sample for it. O(n log n + n x replicas x units); the kernel examines few replicas per sample.
    """
    pressures = [_pressures(loads, num_replicas) for loads in (llm, *encoders)]
    published = _assign_by_llm_load(llm, encoders, num_replicas)
    joint = _assign_by_pressure(pressures, num_replicas)
    best = min(published, joint, key=lambda replicas: heaviest_pressure(pressures, replicas, num_replicas))
    return exchange_samples(best, pressures=pressures, num_replicas=num_replicas)


def _pressures(loads: Sequence[float], num_replicas: int) -> list[float]:
    """Return the loads of a unit relative to the least load that the heaviest replica must have."""
    least = max(sum_in_order(loads, range(len(loads))) / num_replicas, max(loads))
    return [load / least if least > 0 else 0.0 for load in loads]


def _assign_by_llm_load(llm: Sequence[float], encoders: Units, num_replicas: int) -> list[int]:
    shares = dominant_shares(encoders, members=range(len(llm)))
    bins = [(0.0, 0.0, 0)] * num_replicas  # LLM load, encoder share, number of samples
    replicas = [0] * len(llm)
    for sample in sort_descending(shares):
        replica = min(range(num_replicas), key=bins.__getitem__)
        llm_load, encoder_share, count = bins[replica]
        bins[replica] = llm_load + llm[sample], encoder_share + shares[sample], count + 1
        replicas[sample] = replica
    return replicas


def _assign_by_pressure(pressures: Units, num_replicas: int) -> list[int]:
    """Return the replicas. Empty ones come first; ties go to the least sum of the samples' pressures, then to the fewest."""
    weights = [max(column) for column in zip(*pressures, strict=True)]
    loads = [[0.0] * num_replicas for _ in pressures]
    weight, count, replicas = [0.0] * num_replicas, [0] * num_replicas, [0] * len(weights)
    for sample in sort_descending(weights):
        needed = [(own[sample], of_replica) for own, of_replica in zip(pressures, loads, strict=True) if own[sample] > 0]

        def rank(index: int, needed: Sequence[tuple[float, list[float]]] = needed) -> tuple[bool, float, float, int]:
            largest = max((of_replica[index] + own for own, of_replica in needed), default=0.0)
            return count[index] > 0, largest, weight[index], count[index]

        best = min(range(num_replicas), key=rank)
        for own, of_replica in needed:
            of_replica[best] += own
        weight[best] += weights[sample]
        count[best] += 1
        replicas[sample] = best
    return replicas


def heaviest_pressure(pressures: Units, replicas: Sequence[int], num_replicas: int) -> float:
    """Return the largest sum of any unit's pressures in any replica."""
    heaviest = 0.0
    for own in pressures:
        of_replica = [0.0] * num_replicas
        for pressure, replica in zip(own, replicas, strict=True):
            of_replica[replica] += pressure
        heaviest = max(heaviest, *of_replica)
    return heaviest


class _Replica(NamedTuple):
    samples: list[int]
    loads: list[float]
    """The load of each unit."""

    @property
    def pressure(self) -> float:
        return max(self.loads)


class _Exchange(NamedTuple):
    heavier: float
    """The larger pressure of the two replicas afterwards."""
    give: int
    take: int
    """Indices of the two samples; nothing is taken if `take` is past the end."""


def exchange_samples(replicas: Sequence[int], *, pressures: Units, num_replicas: int) -> list[int]:
    """Return an assignment whose heaviest replica has no more pressure than in the given one.

    The heaviest replica is repeatedly relieved: the lightest ones are tried first, and the first one helps that can take a sample
    from it, or swap one, such that both then have less pressure than the heaviest had (`_find_exchange`). Ends when that replica
    is as light as possible, when none can help it, or when the budget is spent (a count of examined pairs of samples rather than
    a time, so that all ranks agree). Of equally heavy replicas the last one is relieved, and of equally light ones the first one
    helps. A replica is never emptied.
    """
    members: list[list[int]] = [[] for _ in range(num_replicas)]
    for sample, replica in enumerate(replicas):
        members[replica].append(sample)
    held = [_hold(samples, pressures) for samples in members]
    by_pressure = sorted((each.pressure, replica) for replica, each in enumerate(held))
    num_steps = LEAST_STEPS + STEPS_PER_SAMPLE * len(replicas)
    while num_steps > 0 and by_pressure[-1][0] > EVEN_ENOUGH:
        most, heavy = by_pressure[-1]
        for pressure, light in by_pressure:
            best = _Exchange(most, 0, 0)
            if pressure >= most or num_steps <= 0:
                break
            best, num_looks = _find_exchange(held[heavy], held[light], pressures)
            num_steps -= num_looks
            if best.heavier < most:
                break
        if best.heavier >= most:
            break
        by_pressure = [entry for entry in by_pressure if entry[1] not in (heavy, light)]
        given, taken = members[heavy].pop(best.give), members[light][best.take : best.take + 1]
        members[light] = sorted([given, *(sample for sample in members[light] if sample not in taken)])
        members[heavy] = sorted([*members[heavy], *taken])
        for replica in (heavy, light):
            held[replica] = _hold(members[replica], pressures)
            insort(by_pressure, (held[replica].pressure, replica))
    replica_of = {sample: replica for replica, samples in enumerate(members) for sample in samples}
    return [replica_of[sample] for sample in range(len(replicas))]


def _hold(samples: list[int], pressures: Units) -> _Replica:
    return _Replica(samples, [sum_in_order(own, samples) for own in pressures])


def _find_exchange(heavy: _Replica, light: _Replica, pressures: Units) -> tuple[_Exchange, int]:
    """Return the first exchange that closes a quarter of the gap, else the best one; and the number of examined exchanges.

    Samples are tried by index, given before taken; taking none comes last, and is excluded if it would empty the heavy replica.
    """
    most = heavy.pressure
    best, num_looks = _Exchange(most, 0, 0), 0
    enough = most - (most - light.pressure) / 4
    takes: list[int | None] = [*light.samples]
    if len(heavy.samples) > 1:
        takes.append(None)
    for give, given in enumerate(heavy.samples):
        for take, taken in enumerate(takes):
            num_looks += 1
            heavier = 0.0
            for own, of_heavy, of_light in zip(pressures, heavy.loads, light.loads, strict=True):
                moved = own[given] - (0.0 if taken is None else own[taken])
                heavier = max(heavier, of_heavy - moved, of_light + moved)
            if heavier < best.heavier:
                best = _Exchange(heavier, give, take)
            if best.heavier <= enough:
                return best, num_looks
    return best, num_looks
