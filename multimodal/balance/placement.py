"""Places the items of encoders and the samples of generators, given the LLM's microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from multimodal.balance.algorithms.post_balance import post_balance_array
from multimodal.balance.balance_options import Granularity
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.cut_evenly import cut_evenly
from multimodal.values.arrays.length_arrays import LengthBatch
from multimodal.values.arrays.rows import Integers, row_starts, take_rows
from multimodal.values.assignment import Assignment, PlacedAtoms
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.step_graph import StepGraph


class Groups(NamedTuple):
    """The atoms of a unit, as numbers of `BatchWork`, by replica and microbatch."""

    atoms: Integers
    """[num_atoms] replica after replica, microbatch after microbatch."""
    atom_starts: Integers
    """[num_microbatches + 1] into the atoms."""
    microbatch_starts: Integers
    """[num_replicas + 1] into the microbatches of all replicas."""


Microbatches = tuple[Integers, Integers]
"""Microbatches in some order: starts, atoms."""


def follow_llm(llm: Groups, work: BatchWork, *, plan: Plan, encoded: Groups | None = None) -> Assignment:
    """Place encoders and generators beside the LLM's microbatches.

    encoded: the samples that encoders process in each microbatch, where they differ from the LLM's.
    """
    return _place_units(follow_samples, llm, work, plan=plan, encoded=llm if encoded is None else encoded)


def place_every_unit(llm: Groups, work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance encoders by themselves, in the order in which these microbatches of the LLM need them; generators follow."""
    return _place_units(balance_items, llm, work, plan=plan, encoded=llm)


def _place_units(
    place_encoder: Callable[..., Groups], llm: Groups, work: BatchWork, *, plan: Plan, encoded: Groups
) -> Assignment:
    graph, arrays, needed = work.graph, work.arrays, order_by_time(encoded)
    placed: dict[str, PlacedAtoms] = {}
    for unit in graph.encoders:
        held = plan.units[unit.name]
        atoms, *starts = place_encoder(
            needed, work, unit=unit.name, num_replicas=held.data_parallel_size, shares=held.microbatch_shares
        )
        items = arrays.items_of(unit.name)[atoms]
        placed[unit.name] = PlacedAtoms(arrays.sample_ids[arrays.sample_of_item[items]], arrays.index_of_item[items], *starts)
    of_llm = PlacedAtoms(arrays.sample_ids[llm.atoms], np.full(len(llm.atoms), -1), *llm[1:])
    return Assignment.of_arrays({**placed, graph.backbone.name: of_llm, **place_generators(of_llm, graph=graph, plan=plan)})


def place_generators(llm: PlacedAtoms, *, graph: ModelGraph, plan: Plan) -> dict[str, PlacedAtoms]:
    """Give every generator the LLM's microbatches as they are, dealt round robin to the generator's own replicas.

    The LLM's microbatches are dealt in the order of `order_by_time`, so that a generator with as many replicas keeps the LLM's
    placement. O(samples).
    """
    groups = Groups(np.arange(len(llm.sample_ids)), llm.atom_starts, llm.microbatch_starts)
    placed: dict[str, PlacedAtoms] = {}
    for unit in graph.generators:
        dealt = deal(*order_by_time(groups), num_replicas=plan.units[unit.name].data_parallel_size)
        placed[unit.name] = PlacedAtoms(llm.sample_ids[dealt.atoms], llm.item_indices[dealt.atoms], *dealt[1:])
    return placed


def drop_idle_samples(assignment: Assignment, *, graph: ModelGraph, lengths: Sequence[SampleLengths]) -> Assignment:
    """Remove from a generator's microbatches the samples in which it has nothing to make, and microbatches that end up empty.

    lengths: the global batch. Nothing else moves; an assignment without generators comes back as it is. O(samples).
    """
    if not graph.generators:
        return assignment
    placed, arrays = dict(assignment.placed), LengthBatch.of(lengths).arrays
    for unit in graph.generators:
        busy = arrays.sample_ids[arrays.sample_of_item[arrays.items_of(unit.name)]]
        placed[unit.name] = placed[unit.name].with_samples(busy)
    return Assignment.of_arrays(placed)


def as_computed(step: StepGraph, lengths: Sequence[SampleLengths]) -> StepGraph:
    """Return a step with its assignment as it is computed: `drop_idle_samples`, then `even_out_replicas`."""
    assignment = drop_idle_samples(step.assignment, graph=step.graph, lengths=lengths)
    assignment = even_out_replicas(assignment, plan=step.plan)
    return step if assignment is step.assignment else replace(step, assignment=assignment)


def even_out_replicas(assignment: Assignment, *, plan: Plan) -> Assignment:
    """Give all replicas of units whose experts are shared as many microbatches: those that have fewer get empty ones.

    They compute other replicas' tokens in them. Nothing else moves; without such units the assignment comes back as it is.
    """
    if not plan.units_with_shared_experts:
        return assignment
    evened = {name: assignment.placed[name].with_even_counts() for name in plan.units_with_shared_experts}
    return Assignment.of_arrays({**assignment.placed, **evened})


def order_by_time(groups: Groups) -> Microbatches:
    """List microbatches in the order in which they are computed: all replicas' first ones, then all second ones, and so on.

    In place of those that a replica has fewer than others stand empty ones: they keep its turn when microbatches are dealt.
    """
    counts, empty = np.diff(groups.microbatch_starts), len(groups.atom_starts) - 1
    rounds = np.arange(counts.max(initial=0))[:, None]
    numbers = np.where(rounds < counts, groups.microbatch_starts[:-1] + rounds, empty)
    return take_rows(np.append(groups.atom_starts, groups.atom_starts[-1]), groups.atoms, numbers.ravel())


def deal(starts: Integers, atoms: Integers, *, num_replicas: int, shares: tuple[int, ...] = ()) -> Groups:
    """Give microbatches to replicas in turn; empty ones take their turn and are left out.

    shares: `UnitPlan.microbatch_shares`; with s shares, microbatch k goes to one of the replicas whose number is k modulo
    num_replicas / s, in turns that come as often as the shares say.
    """
    busy = np.flatnonzero(np.diff(starts))
    shares = shares or (1,) * num_replicas
    turns, num_alike = turns_of(shares), num_replicas // len(shares)
    replicas = turns[busy // num_alike % len(turns)] * num_alike + busy % num_alike
    dealt_starts, dealt = take_rows(starts, atoms, busy[np.argsort(replicas, kind="stable")])
    return Groups(dealt, dealt_starts, row_starts(np.bincount(replicas, minlength=num_replicas)))


def turns_of(shares: tuple[int, ...]) -> Integers:
    """Return whose turn it is, [sum of shares], spread so that everyone is always about as far as the others.

    The k-th turn of someone with a share of n comes when k / n of all turns are over; ties go to the first.
    """
    owners = np.repeat(np.arange(len(shares)), shares)
    numbers = np.arange(len(owners)) - np.repeat(row_starts(shares)[:-1], shares) + 1
    turns: Integers = owners[np.lexsort((owners, numbers / np.array(shares)[owners]))]
    return turns


def follow_samples(
    microbatches: Microbatches, work: BatchWork, *, unit: str, num_replicas: int, shares: tuple[int, ...] = ()
) -> Groups:
    """Let an encoder's items go with their samples: one microbatch per LLM microbatch, or of the encoder's own size.

    microbatches: the LLM's, ordered by time. They are dealt over the encoder's replicas, which keeps a sample's items on the
    replica of its own number where encoder and LLM have equally many. shares: as for `deal`.
    """
    starts, items = _items_of(microbatches, work, unit=unit)
    if (size := work.options.encoder_micro_batch_sizes.get(unit)) is not None:
        starts = np.append(np.arange(0, len(items), size), len(items))
    return deal(starts, items, num_replicas=num_replicas, shares=shares)


def _items_of(microbatches: Microbatches, work: BatchWork, *, unit: str) -> Microbatches:
    """Return the items of microbatches of samples that an encoder processes, sample by sample, in document order."""
    starts, samples = microbatches
    item_starts, items = take_rows(*work.item_rows(unit), samples)
    return item_starts[starts], items


def balance_items(
    microbatches: Microbatches, work: BatchWork, *, unit: str, num_replicas: int, shares: tuple[int, ...] = ()
) -> Groups:
    """Balance an encoder's items over its replicas by their own work, wherever their samples are (OrchMLLM, Alg. 1-5).

    Each replica takes its items in the order in which the LLM needs them, and cuts them into runs of nearly equal work: as many
    as there would be if each LLM microbatch with items had one, dealt over the replicas, or of the encoder's own size.

    microbatches: the LLM's, ordered by time. shares: as for `deal`, of the work and of the microbatches; a replica with a share
    of n takes n of as many equal parts as there are shares in all.
    """
    starts, needed = _items_of(microbatches, work, unit=unit)
    if not len(needed):
        return Groups(needed, np.zeros(1, np.int64), np.zeros(num_replicas + 1, np.int64))
    # Groups of items that stay together are numbered in the order of samples and items.
    group_of_item = np.arange(len(needed))
    if work.options.granularity is Granularity.SAMPLE:
        _, group_of_item = np.unique(work.of_unit(unit).samples, return_inverse=True)
    shares = shares or (1,) * num_replicas
    num_parts = np.repeat(shares, num_replicas // len(shares))
    bins = post_balance_array(work.amounts(unit, group_of_item), num_bins=int(num_parts.sum()), cost=work.cost(unit))
    replicas = np.repeat(np.arange(num_replicas), num_parts)[bins[group_of_item[needed]]]
    items = needed[np.argsort(replicas, kind="stable")]
    sizes = np.bincount(replicas, minlength=num_replicas)
    if (size := work.options.encoder_micro_batch_sizes.get(unit)) is not None:
        return cut_replicas(items, np.ones(len(items), np.int64), sizes, counts=-(-sizes // size))
    counts = -(-int(np.count_nonzero(np.diff(starts))) * num_parts // int(num_parts.sum()))
    return cut_replicas(items, work.amounts(unit)[items], sizes, counts=counts)


def cut_replicas(atoms: Integers, amounts: Integers, sizes: Integers, *, counts: Integers) -> Groups:
    """Cut the atoms of each replica into at most `counts` microbatches of nearly equal amounts; none is empty.

    atoms: replica after replica; amounts: one per atom; sizes: [num_replicas] atoms of each.
    """
    return Groups(atoms, *cut_evenly(amounts, row_starts(sizes), counts))
