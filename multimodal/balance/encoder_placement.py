"""Places the items of encoders, given where the LLM's samples are: beside them, or balanced on their own."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil

from multimodal.balance.balance_options import Granularity
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.encoder_items import list_items
from multimodal.balance.post_balance import post_balance
from multimodal.values.assignment import Atom, Microbatch

Replicas = tuple[tuple[Microbatch, ...], ...]


def in_time(replicas: Sequence[Sequence[Microbatch]]) -> list[Microbatch]:
    """Microbatches in the order in which they are computed: all replicas' first ones, then all second ones, and so on."""
    num_rounds = max((len(replica) for replica in replicas), default=0)
    return [replica[index] for index in range(num_rounds) for replica in replicas if index < len(replica)]


def deal(microbatches: Sequence[Microbatch], *, num_replicas: int) -> Replicas:
    """Give microbatches to replicas in turn; empty ones take their turn and are left out."""
    return tuple(tuple(filter(None, microbatches[replica::num_replicas])) for replica in range(num_replicas))


def follow_samples(microbatches: Sequence[Microbatch], work: BatchWork, *, unit: str, num_replicas: int) -> Replicas:
    """Let an encoder's items go with their samples: one microbatch per LLM microbatch, or of the encoder's own size.

    microbatches: the LLM's, in time. They are dealt over the encoder's replicas, which keeps a sample's items on the replica of
    its own number where encoder and LLM have equally many.
    """
    items = [list_items(microbatch, unit=unit, lengths_by_sample=work.lengths_by_sample) for microbatch in microbatches]
    if (size := work.options.encoder_micro_batch_sizes.get(unit)) is not None:
        flat = [atom for microbatch in items for atom in microbatch]
        items = [tuple(flat[first : first + size]) for first in range(0, len(flat), size)]
    return deal(items, num_replicas=num_replicas)


def balance_items(microbatches: Sequence[Microbatch], work: BatchWork, *, unit: str, num_replicas: int) -> Replicas:
    """Balance an encoder's items over its replicas by their own work, wherever their samples are (OrchMLLM, Alg. 1-5).

    Each replica takes its items in the order in which the LLM needs them, and cuts them into runs of nearly equal work: as many
    as there would be if each LLM microbatch with items had one, dealt over the replicas, or of the encoder's own size.

    microbatches: the LLM's, in time.
    """
    needed = [list_items(microbatch, unit=unit, lengths_by_sample=work.lengths_by_sample) for microbatch in microbatches]
    groups = sorted(_groups(needed, work.options.granularity))
    if not groups:
        return ((),) * num_replicas
    position = {atom: index for index, atom in enumerate(atom for items in needed for atom in items)}
    bins = post_balance(work.amounts(unit, groups), num_bins=num_replicas, cost=work.cost(unit))
    default_count = ceil(sum(map(bool, needed)) / num_replicas)
    size = work.options.encoder_micro_batch_sizes.get(unit)
    replicas = []
    for members in bins:
        atoms = sorted((atom for index in members for atom in groups[index]), key=position.__getitem__)
        if size is not None:
            count = ceil(len(atoms) / size)
            replicas.append(cut_evenly(atoms, [1] * len(atoms), count=count))
        else:
            replicas.append(cut_evenly(atoms, work.amounts(unit, [(atom,) for atom in atoms]), count=default_count))
    return tuple(replicas)


def _groups(needed: Sequence[Microbatch], granularity: Granularity) -> list[Microbatch]:
    """Atoms that stay together."""
    if granularity is Granularity.ITEM:
        return [(atom,) for items in needed for atom in items]
    of_sample: dict[int, list[Atom]] = {}
    for atom in (atom for items in needed for atom in items):
        of_sample.setdefault(atom.sample_id, []).append(atom)
    return [tuple(atoms) for atoms in of_sample.values()]


def cut_evenly(atoms: Sequence[Atom], amounts: Sequence[int], *, count: int) -> tuple[Microbatch, ...]:
    """Cut a sequence into at most `count` runs whose largest amount is the least possible; no run is empty.

    amounts: one per atom, not negative. O(n log sum).
    """
    count = min(count, len(atoms))
    if not count:
        return ()
    lowest, highest = max(max(amounts), -(-sum(amounts) // count)), sum(amounts)
    while lowest < highest:
        middle = (lowest + highest) // 2
        lowest, highest = (lowest, middle) if len(_runs(amounts, middle)) <= count else (middle + 1, highest)
    starts = _runs(amounts, lowest)
    starts = _split_further(starts, amounts, count=count)
    bounds = [*starts, len(atoms)]
    return tuple(tuple(atoms[first:last]) for first, last in pairwise(bounds))


def _runs(amounts: Sequence[int], limit: int) -> list[int]:
    """Starts of as few runs as keep every run within the limit."""
    starts, total = [0], 0
    for index, amount in enumerate(amounts):
        if total + amount > limit:
            starts.append(index)
            total = 0
        total += amount
    return starts


def _split_further(starts: list[int], amounts: Sequence[int], *, count: int) -> list[int]:
    """Halve the largest run that has more than one atom until there are `count` runs."""
    sums = [0, *accumulate(amounts)]
    while len(starts) < count:
        bounds = [*starts, len(amounts)]
        first, last = max(
            ((first, last) for first, last in pairwise(bounds) if last - first > 1),
            key=lambda run: (sums[run[1]] - sums[run[0]], -run[0]),
        )
        half = min(range(first + 1, last), key=lambda cut: (max(sums[cut] - sums[first], sums[last] - sums[cut]), cut))
        starts = sorted([*starts, half])
    return starts
