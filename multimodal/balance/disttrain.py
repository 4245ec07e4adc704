"""Balances as DistTrain does: samples over replicas by their total work, microbatches in an order that fills pipelines."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.post_balance import partition_longest_first
from multimodal.balance.algorithms.reorder_microbatches import reorder_microbatches
from multimodal.balance.balance_options import choose_shortest
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.balance.placement import Groups, cut_replicas, follow_llm
from multimodal.values.arrays.rows import Floats, integers, row_numbers, take_rows
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import Role
from multimodal.values.plan import Plan


def balance_disttrain(work: BatchWork, *, plan: Plan) -> Assignment:
    """Reorder samples over the LLM's replicas (DistTrain, Alg. 2), then each replica's microbatches (Alg. 3).

    A sample weighs its work in all units together, and stays whole: encoders take the items of the LLM's microbatches. Inside a
    replica, microbatches of equally many samples are cut in the order of their ids and then reordered. With an
    `options.predictor`, the order of `order_llm` with the shortest step under the run's own schedule and stages is taken. Alg. 2
    lists the samples by ascending work, but its bound of 4/3 (Graham's) is that of descending work, which is the order here.
    """
    num_replicas = plan.units[work.graph.backbone.name].data_parallel_size
    bins = partition_longest_first(work.whole_sample_flops().tolist(), num_bins=num_replicas)
    sizes = integers(map(len, bins))
    samples = integers(chain.from_iterable(map(sorted, bins)))
    count = work.count_microbatches(num_replicas)
    groups = cut_replicas(samples, np.ones(len(samples), np.int64), sizes, counts=np.full(num_replicas, count))
    ordered = (follow_llm(each, work, plan=plan) for each in order_llm(groups, work, plan=plan))
    return choose_shortest(ordered, work.lengths, work.options.predictor)


def order_llm(llm: Groups, work: BatchWork, *, plan: Plan) -> Iterator[Groups]:
    """Yield each replica's microbatches in several orders that may keep its pipeline full, Alg. 3's first and the given one last.

    Alg. 3 models a pipeline without messages whose stages all have one virtual stage, or all several. So other orders compete:
    Alg. 3 with the virtual stages of the LLM; light microbatches first and last and heavy ones in the middle, so that pipelines
    fill and drain quickly; and descending.
    """
    seconds = _stage_seconds(llm, work, plan=plan)
    yield _reordered(llm, partial(_fill_waits, seconds, num_stages=seconds.shape[1]))
    backbone = plan.units[work.graph.backbone.name]
    if (num_chunks := backbone.num_stages_of(0) // len(backbone.replicas[0].stages)) > 1:
        is_llm = np.concatenate([np.full(count, role is Role.BACKBONE) for role, _, count in _roles(work, plan)])
        # Even parts of the LLM's seconds; those of other units are all in the first chunk.
        shares = np.where(is_llm, 1 / num_chunks, np.arange(num_chunks)[:, None] == 0)
        of_chunks = np.concatenate([seconds * share[:, None] for share in shares], axis=1)
        yield _reordered(llm, partial(_fill_waits, of_chunks, num_stages=seconds.shape[1]))
    sizes = seconds.sum(axis=(0, 1))
    yield _reordered(llm, partial(_light_outside, sizes))
    yield _reordered(llm, lambda own: np.argsort(-sizes[own], kind="stable"))
    yield llm


def _reordered(llm: Groups, order_of: Callable[[slice], npt.ArrayLike]) -> Groups:
    """Reorder each replica's microbatches; order_of: from the range of their numbers to the order within it."""
    order = np.arange(len(llm.atom_starts) - 1)
    for first, last in pairwise(llm.microbatch_starts.tolist()):
        if last - first >= 2:
            order[first:last] = first + np.asarray(order_of(slice(first, last)), np.int64)
    atom_starts, atoms = take_rows(llm.atom_starts, llm.atoms, order)
    return Groups(atoms, atom_starts, llm.microbatch_starts)


def _fill_waits(seconds: Floats, own: slice, *, num_stages: int) -> npt.ArrayLike:
    """Return the order of Alg. 3 for some microbatches; seconds: [2, num_virtual_stages, num_microbatches]."""
    if own.stop - own.start < 3 or not num_stages:  # the first stays first, and without work no order is better
        return range(own.stop - own.start)
    forward, backward = seconds[:, :, own]
    return reorder_microbatches(forward, backward_seconds=backward, num_stages=num_stages)


def _light_outside(sizes: Floats, own: slice) -> npt.ArrayLike:
    """Return an order in which sizes rise towards the middle and fall again."""
    rising = np.argsort(sizes[own], kind="stable")
    return np.concatenate((rising[::2], rising[1::2][::-1]))


def _roles(work: BatchWork, plan: Plan) -> Iterator[tuple[Role, list[str], int]]:
    """Yield the units of each role that have work in this batch, and their number of stages."""
    for role in (Role.ENCODER, Role.BACKBONE, Role.GENERATOR):
        units = [unit.name for unit in work.graph.units if unit.role is role and work.of_unit(unit.name).num_tokens.any()]
        yield role, units, max((len(plan.units[unit].replicas[0].stages) for unit in units), default=0)


def _stage_seconds(llm: Groups, work: BatchWork, *, plan: Plan) -> Floats:
    """[2, num_stages, num_microbatches]: seconds of forward and backward in each stage of one chain: encoders, LLM, generators.

    Stages of units without work in this batch are left out. All ranks are assumed to be equally fast. Units of the same role run
    side by side, so the slowest counts in each stage; a unit with fewer replicas than the LLM takes several chains' microbatches
    in turn, and is slower by that factor.
    """
    num_chains = plan.units[work.graph.backbone.name].data_parallel_size
    num_microbatches, by_sample = len(llm.atom_starts) - 1, np.arange(len(llm.atoms) + 1)
    microbatch_of_sample = row_numbers(llm.atom_starts)
    stages_by_role = []
    for role, units, num_stages in _roles(work, plan):
        slowest = np.zeros((2, num_stages, num_microbatches))
        for unit in units:
            rows = work.item_rows(unit) if role is Role.ENCODER else (by_sample, by_sample[:-1])
            starts, atoms = take_rows(*rows, llm.atoms)
            microbatches = np.repeat(microbatch_of_sample, np.diff(starts))
            sums = [sum_floats_by(microbatches, each[atoms], num_microbatches) for each in work.flops(unit)]
            slowest = np.maximum(slowest, (np.stack(sums) * num_chains / len(plan.units[unit].ranks))[:, None])
        stages_by_role.append(slowest)
    return np.concatenate(stages_by_role, axis=1)
