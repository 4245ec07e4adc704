"""Places the items of encoders and the samples of generators, given the LLM's microbatches."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import ceil

from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.balance_options import Granularity
from multimodal.balance.batch_work import BatchWork, list_items
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths

Replicas = tuple[tuple[Microbatch, ...], ...]
"""The microbatches of each replica of a unit, in their order."""


def follow_llm(
    llm: Replicas, work: BatchWork, *, plan: Plan, encoded: Sequence[Sequence[Microbatch]] | None = None
) -> Assignment:
    """Place encoders and generators beside the LLM's microbatches.

    encoded: the samples that encoders process in each microbatch, where they differ from the LLM's.
    """
    return _place_units(follow_samples, llm, work, plan=plan, encoded=llm if encoded is None else encoded)


def place_every_unit(llm: Replicas, work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance encoders by themselves, in the order in which these microbatches of the LLM need them; generators follow."""
    return _place_units(balance_items, llm, work, plan=plan, encoded=llm)


def _place_units(
    place_encoder: Callable[..., Replicas],
    llm: Replicas,
    work: BatchWork,
    *,
    plan: Plan,
    encoded: Sequence[Sequence[Microbatch]],
) -> Assignment:
    graph, needed = work.graph, order_by_time(encoded)
    encoders = {
        unit.name: place_encoder(needed, work, unit=unit.name, num_replicas=plan.units[unit.name].data_parallel_size)
        for unit in graph.encoders
    }
    return Assignment({**encoders, graph.backbone.name: llm, **place_generators(llm, graph=graph, plan=plan)})


def place_generators(llm: Sequence[Sequence[Microbatch]], *, graph: ModelGraph, plan: Plan) -> dict[str, Replicas]:
    """Give every generator the LLM's microbatches as they are, dealt round robin to the generator's own replicas.

    llm: the LLM's replicas. Their microbatches are dealt in the order of `order_by_time`, so that a generator with as many
    replicas keeps the LLM's placement where these have equally many microbatches. O(samples).
    """
    microbatches = order_by_time(llm)
    return {unit.name: deal(microbatches, num_replicas=plan.units[unit.name].data_parallel_size) for unit in graph.generators}


def drop_idle_samples(assignment: Assignment, *, graph: ModelGraph, lengths: Sequence[SampleLengths]) -> Assignment:
    """Remove from a generator's microbatches the samples in which it has nothing to make, and microbatches that end up empty.

    lengths: the global batch. Nothing else moves; an assignment without generators comes back as it is. O(samples).
    """
    if not graph.generators:
        return assignment
    units = dict(assignment.units)
    for unit in graph.generators:
        busy = {sample.sample_id for sample in lengths if any(item.unit == unit.name for item in sample.items)}
        replicas = [
            [tuple(atom for atom in microbatch if atom.sample_id in busy) for microbatch in replica]
            for replica in units[unit.name]
        ]
        units[unit.name] = tuple(tuple(filter(None, replica)) for replica in replicas)
    return Assignment(units)


def order_by_time(replicas: Sequence[Sequence[Microbatch]]) -> list[Microbatch]:
    """List microbatches in the order in which they are computed: all replicas' first ones, then all second ones, and so on."""
    num_rounds = max((len(replica) for replica in replicas), default=0)
    return [replica[index] for index in range(num_rounds) for replica in replicas if index < len(replica)]


def deal(microbatches: Sequence[Microbatch], *, num_replicas: int) -> Replicas:
    """Give microbatches to replicas in turn; empty ones take their turn and are left out."""
    return tuple(tuple(filter(None, microbatches[replica::num_replicas])) for replica in range(num_replicas))


def follow_samples(microbatches: Sequence[Microbatch], work: BatchWork, *, unit: str, num_replicas: int) -> Replicas:
    """Let an encoder's items go with their samples: one microbatch per LLM microbatch, or of the encoder's own size.

    microbatches: the LLM's, ordered by time. They are dealt over the encoder's replicas, which keeps a sample's items on the
    replica of its own number where encoder and LLM have equally many.
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

    microbatches: the LLM's, ordered by time.
    """
    needed = [list_items(microbatch, unit=unit, lengths_by_sample=work.lengths_by_sample) for microbatch in microbatches]
    groups = sorted(_group_atoms(needed, work.options.granularity))
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
            replicas.append(cut_evenly(atoms, [1] * len(atoms), count=ceil(len(atoms) / size)))
        else:
            replicas.append(cut_evenly(atoms, work.amounts(unit, [(atom,) for atom in atoms]), count=default_count))
    return tuple(replicas)


def _group_atoms(needed: Sequence[Microbatch], granularity: Granularity) -> list[Microbatch]:
    """Return the groups of atoms that stay together."""
    groups: dict[tuple[int, ...], list[Atom]] = {}
    for atom in (atom for items in needed for atom in items):
        key = (atom.sample_id, atom.item_index) if granularity is Granularity.ITEM else (atom.sample_id,)
        groups.setdefault(key, []).append(atom)
    return [tuple(atoms) for atoms in groups.values()]


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
        lowest, highest = (lowest, middle) if len(_cut_at_limit(amounts, middle)) <= count else (middle + 1, highest)
    starts = _split_further(_cut_at_limit(amounts, lowest), amounts, count=count)
    return tuple(tuple(atoms[first:last]) for first, last in pairwise([*starts, len(atoms)]))


def _cut_at_limit(amounts: Sequence[int], limit: int) -> list[int]:
    """Return the starts of as few runs as keep every run within the limit."""
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
