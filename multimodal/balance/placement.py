"""Places the items of encoders and the samples of generators, given the LLM's microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from multimodal.balance.algorithms.cut_evenly import cut_evenly
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.balance_options import Granularity
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.balance.length_cost import LengthCost
from multimodal.values.arrays.rows import Integers, group_rows, integers, row_numbers, row_starts, take_rows
from multimodal.values.assignment import Assignment, PlacedAtoms
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import LengthBatch, SampleLengths


class Groups(NamedTuple):
    """The atoms of a unit, as numbers of `BatchWork`, by replica and microbatch."""

    atoms: Integers
    """[num_atoms] replica after replica, microbatch after microbatch."""
    atom_starts: Integers
    """[num_microbatches + 1] into the atoms."""
    microbatch_starts: Integers
    """[num_replicas + 1] into the microbatches of all replicas."""

    @classmethod
    def of_rounds(cls, atoms: Integers, places: Integers, *, num_rounds: int, num_replicas: int) -> "Groups":
        """Build from atoms and their places, replica x num_rounds + round; rounds without atoms are left out."""
        starts, atoms = group_rows(places, atoms, num_replicas * num_rounds)
        busy = np.flatnonzero(np.diff(starts))
        counts = np.bincount(busy // num_rounds, minlength=num_replicas)
        return cls(atoms, np.append(starts[busy], len(atoms)), row_starts(counts))


Microbatches = tuple[Integers, Integers]
"""Microbatches in some order: starts, atoms."""


def follow_llm(llm: Groups, work: BatchWork, *, plan: Plan, encoded: Groups | None = None) -> Assignment:
    """Place encoders and generators beside the LLM's microbatches; encoded: the samples that encoders process, if others.

    With `refines_encoders`, encoders are balanced on their own in the order of these samples.
    """
    place_encoder = balance_items if work.options.refines_encoders else follow_samples
    return _place_units(place_encoder, llm, work, plan=plan, encoded=llm if encoded is None else encoded)


def place_every_unit(llm: Groups, work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance encoders on their own, in the order in which these microbatches of the LLM need them; generators follow the LLM."""
    return _place_units(balance_items, llm, work, plan=plan, encoded=llm)


def _place_units(
    place_encoder: Callable[..., Groups], llm: Groups, work: BatchWork, *, plan: Plan, encoded: Groups
) -> Assignment:
    graph, arrays, needed = work.graph, work.arrays, order_by_time(encoded)
    placed: dict[str, PlacedAtoms] = {}
    for unit in graph.encoders:
        atoms, *starts = place_encoder(needed, work, unit.name, plan.units[unit.name])
        items = arrays.items_of(unit.name)[atoms]
        placed[unit.name] = PlacedAtoms(arrays.sample_ids[arrays.sample_of_item[items]], arrays.index_of_item[items], *starts)
    of_samples = {graph.backbone.name: llm}
    for unit in graph.generators:  # the LLM's microbatches, round robin
        of_samples[unit.name] = deal(*order_by_time(llm), num_replicas=plan.units[unit.name].data_parallel_size)
    for name, (samples, *starts) in of_samples.items():
        placed[name] = PlacedAtoms(arrays.sample_ids[samples], np.full(len(samples), -1), *starts)
    return Assignment(placed)


def drop_idle_samples(assignment: Assignment, *, graph: ModelGraph, lengths: Sequence[SampleLengths]) -> Assignment:
    """Remove samples without images from a generator's microbatches, and those that become empty. O(samples)."""
    if not graph.generators:
        return assignment
    placed, arrays = dict(assignment.placed), LengthBatch.of(lengths).arrays
    for unit in graph.generators:
        busy = arrays.sample_ids[arrays.sample_of_item[arrays.items_of(unit.name)]]
        placed[unit.name] = placed[unit.name].with_samples(busy)
    return Assignment(placed)


def as_computed(assignment: Assignment, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan) -> Assignment:
    """Return the assignment that is executed: `drop_idle_samples`, `order_by_need`, then `even_out_replicas`."""
    assignment = drop_idle_samples(assignment, graph=graph, lengths=lengths)
    return even_out_replicas(order_by_need(assignment, graph=graph), plan=plan)


def order_by_need(assignment: Assignment, *, graph: ModelGraph) -> Assignment:
    """Put each encoder's microbatches, replica by replica, into the order in which those that they feed run.

    A stage's forwards run in the order of its microbatches, so that units downstream would wait for the others first. O(routes).
    """
    for unit in reversed(graph.encoders):
        placed = assignment.placed[unit.name]
        order = np.lexsort((needed_at(assignment, graph, unit.name), placed.replica_of_microbatch))
        if (np.diff(order) < 0).any():
            ordered = placed.rearranged(order, placed.microbatch_starts)
            assignment = Assignment({**assignment.placed, unit.name: ordered})
    return assignment


def needed_at(assignment: Assignment, graph: ModelGraph, unit: str) -> Integers:
    """[num_microbatches] Return the first index in its replica of the microbatches that need each of a unit's.

    The largest int64 for those that none needs. O(routes of the unit).
    """
    found = np.full(assignment.placed[unit].num_microbatches, np.iinfo(np.int64).max)
    for target in graph.downstream(unit):
        given, taking = assignment.routes(graph).of_edge(unit, target)
        np.minimum.at(found, given, assignment.placed[target].index_in_replica[taking])
    return found


def even_out_replicas(assignment: Assignment, *, plan: Plan) -> Assignment:
    """Give replicas that share experts equally many microbatches: empty ones, in which they compute others' tokens."""
    if not plan.units_with_shared_experts:
        return assignment
    evened = {name: assignment.placed[name].with_even_counts() for name in plan.units_with_shared_experts}
    return Assignment({**assignment.placed, **evened})


def order_by_time(groups: Groups) -> Microbatches:
    """List microbatches in execution order; replicas with fewer than others have empty ones, which keep their turn."""
    counts, empty = np.diff(groups.microbatch_starts), len(groups.atom_starts) - 1
    rounds = np.arange(counts.max(initial=0))[:, None]
    numbers = np.where(rounds < counts, groups.microbatch_starts[:-1] + rounds, empty)
    return take_rows(np.append(groups.atom_starts, groups.atom_starts[-1]), groups.atoms, numbers.ravel())


def deal(starts: Integers, atoms: Integers, *, num_replicas: int, shares: tuple[int, ...] = ()) -> Groups:
    """Give microbatches to replicas in turn; empty ones count as a turn and are left out.

    shares: `UnitPlan.microbatch_shares`; with s shares, microbatch k goes to one of the replicas whose number is k modulo
    num_replicas / s, with the frequencies of the shares.
    """
    busy = np.flatnonzero(np.diff(starts))
    shares = shares or (1,) * num_replicas
    turns, num_alike = turns_of(shares), num_replicas // len(shares)
    replicas = turns[busy // num_alike % len(turns)] * num_alike + busy % num_alike
    dealt_starts, dealt = take_rows(starts, atoms, busy[np.argsort(replicas, kind="stable")])
    return Groups(dealt, dealt_starts, row_starts(np.bincount(replicas, minlength=num_replicas)))


def turns_of(shares: tuple[int, ...]) -> Integers:
    """Return the owner of each turn, [sum of shares]: the k-th of an owner with n comes after k / n of all; ties: the first."""
    owners = np.repeat(np.arange(len(shares)), shares)
    numbers = np.arange(len(owners)) - np.repeat(row_starts(shares)[:-1], shares) + 1
    return owners[np.lexsort((owners, numbers / np.array(shares)[owners]))]


def follow_samples(microbatches: Microbatches, work: BatchWork, unit: str, held: UnitPlan) -> Groups:
    """Keep an encoder's items with their samples: one microbatch per LLM microbatch, or of the encoder's own size.

    microbatches: the LLM's, in execution order, which are dealt over the encoder's replicas.
    """
    starts, items = _items_of(microbatches, work, unit)
    if (size := work.options.encoder_micro_batch_sizes.get(unit)) is not None:
        starts = np.append(np.arange(0, len(items), size), len(items))
    return deal(starts, items, num_replicas=held.data_parallel_size, shares=held.microbatch_shares)


def _items_of(microbatches: Microbatches, work: BatchWork, unit: str) -> Microbatches:
    """Return the items that an encoder processes for microbatches of samples, sample by sample, in document order."""
    starts, samples = microbatches
    item_starts, items = take_rows(*work.item_rows(unit), samples)
    return item_starts[starts], items


def balance_items(microbatches: Microbatches, work: BatchWork, unit: str, held: UnitPlan) -> Groups:
    """Balance an encoder's items over its replicas by their own work, wherever their samples are (OrchMLLM, Alg. 1-5).

    Each replica takes its items in the order in which the LLM needs them, and cuts them into runs of nearly equal work: as many
    as if each LLM microbatch with items had one and they were dealt over the replicas, or of the encoder's own size. A replica
    with a share of n takes n of as many equal parts of the work, and of the microbatches, as the shares add up to.

    Few items make uneven runs. So where replicas have equal shares and microbatches no size of their own, `_balance_rounds`
    competes, and what has less work on the busiest replica and in the largest microbatch together is taken.
    """
    num_replicas = held.data_parallel_size
    starts, needed = _items_of(microbatches, work, unit)
    if not len(needed):
        return Groups(needed, np.zeros(1, np.int64), np.zeros(num_replicas + 1, np.int64))
    # Groups of items that stay together are numbered in the order of samples and items.
    group_of_item = np.arange(len(needed))
    if work.options.granularity is Granularity.SAMPLE:
        _, group_of_item = np.unique(work.of_unit(unit).samples, return_inverse=True)
    of_groups, cost = work.amounts(unit, group_of_item), work.cost(unit)
    shares = held.microbatch_shares or (1,) * num_replicas
    num_parts = np.repeat(shares, num_replicas // len(shares))
    bins = post_balance(of_groups, num_bins=int(num_parts.sum()), cost=cost)
    replicas = np.repeat(np.arange(num_replicas), num_parts)[bins[group_of_item[needed]]]
    items = needed[np.argsort(replicas, kind="stable")]
    sizes = np.bincount(replicas, minlength=num_replicas)
    if (size := work.options.encoder_micro_batch_sizes.get(unit)) is not None:
        return cut_replicas(items, np.ones(len(items), np.int64), sizes, counts=-(-sizes // size))
    counts = -(-int(np.count_nonzero(np.diff(starts))) * num_parts // int(num_parts.sum()))
    of_items = work.amounts(unit)
    cut = cut_replicas(items, of_items[items], sizes, counts=counts)
    if len(set(shares)) > 1:
        return cut
    in_rounds = _balance_rounds(needed, group_of_item, of_groups, cost, num_rounds=int(counts.max()), num_replicas=num_replicas)
    return min(cut, in_rounds, key=lambda groups: _busiest(groups, of_items, cost))


def _balance_rounds(
    needed: Integers, group_of_item: Integers, of_groups: Integers, cost: LengthCost, *, num_rounds: int, num_replicas: int
) -> Groups:
    """Cut all items, in the order of need, into rounds of nearly equal work, and balance each round over the replicas.

    So microbatch k of every replica holds items of round k: those that the LLM needs at about the same time. Of each round, the
    replica with the least work so far takes the largest microbatch. O(items log items).
    """
    _, first = np.unique(group_of_item[needed], return_index=True)
    order = np.argsort(first)  # of groups, by the first of their items
    rounds, _ = cut_evenly(of_groups[order], integers((0, len(order))), integers((num_rounds,)))
    places, total = np.zeros(len(order), np.int64), np.zeros(num_replicas)
    for index, (start, end) in enumerate(pairwise(rounds.tolist())):
        own = order[start:end]
        bins = post_balance(of_groups[own], num_bins=num_replicas, cost=cost)
        loads = cost.row_costs(*group_rows(bins.astype(np.int64), of_groups[own], num_replicas))
        owners = np.zeros(num_replicas, np.int64)
        owners[np.argsort(-loads, kind="stable")] = np.argsort(total, kind="stable")
        total[owners] += loads
        places[own] = owners[bins] * num_rounds + index
    return Groups.of_rounds(needed, places[group_of_item[needed]], num_rounds=num_rounds, num_replicas=num_replicas)


def _busiest(groups: Groups, amounts: Integers, cost: LengthCost) -> float:
    """Return the work of the busiest replica and of the largest microbatch together: what a pipeline takes, filling included."""
    of_microbatches = cost.row_costs(groups.atom_starts, amounts[groups.atoms])
    return float(of_microbatches.max() + sum_floats_by(row_numbers(groups.microbatch_starts), of_microbatches).max())


def cut_replicas(atoms: Integers, amounts: Integers, sizes: Integers, *, counts: Integers) -> Groups:
    """Cut the atoms of each replica (sizes: [num_replicas]) into at most `counts` microbatches of nearly equal amounts."""
    return Groups(atoms, *cut_evenly(amounts, row_starts(sizes), counts))


def has_unequal_shares(graph: ModelGraph, plan: Plan) -> bool:
    """Return True if replicas take unequal shares of a batch: those of a unit differ, or the plan sets shares for the LLM."""
    return any(unit.is_unlike for unit in plan.units.values()) or bool(plan.units[graph.backbone.name].microbatch_shares)


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
    alone = replace(options, num_microbatches=sum(counts), tokens_per_microbatch=None, predictor=None, refines_encoders=False)
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
