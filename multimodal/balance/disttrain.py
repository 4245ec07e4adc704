"""Balances as DistTrain does: samples over replicas by their whole work, microbatches in an order that keeps pipelines full."""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.reorder_microbatches import reorder_microbatches
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, read_batch, sum_floats_by
from multimodal.balance.placement import Groups, cut_replicas, follow_llm
from multimodal.values.arrays.rows import integers, row_numbers, take_rows
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def balance_disttrain(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Reorder samples over the LLM's replicas (DistTrain, Alg. 2), then each replica's microbatches (Alg. 3).

    A sample weighs its work in all units together, and stays whole: encoders take the items of the LLM's microbatches. Inside a
    replica, microbatches of equally many samples are cut in the order of their ids and then reordered.

    Alg. 2's listing goes through the samples by ascending work, but its bound of 4/3 (Graham's) is that of descending work: in
    ascending order, the largest samples come when nothing small is left to even them out. Here the order is descending; the
    heaviest replica was lighter so on every length distribution measured (`benchmarks/microbatch_assignment.py`).

    The result does not depend on the order of `lengths`. Raises AssignmentError as `validate_inputs` does.
    """
    work = read_batch(lengths, graph=graph, options=options)
    num_replicas = plan.units[graph.backbone.name].data_parallel_size
    bins = partition_longest_first(work.whole_sample_flops().tolist(), num_bins=num_replicas)
    sizes = integers(map(len, bins))
    samples = integers(chain.from_iterable(map(sorted, bins)))
    count = work.count_microbatches(num_replicas)
    groups = cut_replicas(samples, np.ones(len(samples), np.int64), sizes, counts=np.full(num_replicas, count))
    return follow_llm(reorder_llm(groups, work, plan=plan), work, plan=plan)


def reorder_llm(llm: Groups, work: BatchWork, *, plan: Plan) -> Groups:
    """Put each replica's microbatches into the order in which its pipeline waits least (DistTrain, Alg. 3)."""
    seconds = _stage_seconds(llm, work, plan=plan)
    order = np.arange(len(llm.atom_starts) - 1)
    for first, last in pairwise(llm.microbatch_starts.tolist()):
        if last - first >= 3:  # the first stays first, and of the rest there must be a choice
            forward, backward = seconds[:, :, first:last]
            found = reorder_microbatches(forward, backward_seconds=backward, num_stages=len(forward))
            order[first:last] = first + np.array(found)
    atom_starts, atoms = take_rows(llm.atom_starts, llm.atoms, order)
    return Groups(atoms, atom_starts, llm.microbatch_starts)


def _stage_seconds(llm: Groups, work: BatchWork, *, plan: Plan) -> npt.NDArray[np.float64]:
    """[2, num_stages, num_microbatches]: forward and backward of each in each stage of one chain: encoders, LLM, generators.

    Stages of units that have nothing to do in this batch are not among them.
    Seconds at equal speed of all ranks. Units of the same role run side by side, so the slowest counts in each stage; a unit with
    fewer replicas than the LLM takes several chains' microbatches in turn, which makes it as much slower.
    """
    num_chains = plan.units[work.graph.backbone.name].data_parallel_size
    num_microbatches, by_sample = len(llm.atom_starts) - 1, np.arange(len(llm.atoms) + 1)
    microbatch_of_sample = row_numbers(llm.atom_starts)
    stages_by_role = []
    for role in (Role.ENCODER, Role.BACKBONE, Role.GENERATOR):
        units = [unit.name for unit in work.graph.units if unit.role is role and work.of_unit(unit.name).num_tokens.any()]
        num_stages = max((len(plan.units[unit].replicas[0].stages) for unit in units), default=0)
        slowest = np.zeros((2, num_stages, num_microbatches))
        for unit in units:
            rows = work.item_rows(unit) if role is Role.ENCODER else (by_sample, by_sample[:-1])
            starts, atoms = take_rows(*rows, llm.atoms)
            microbatches = np.repeat(microbatch_of_sample, np.diff(starts))
            sums = [sum_floats_by(microbatches, each[atoms], num_microbatches) for each in work.flops(unit)]
            slowest = np.maximum(slowest, (np.stack(sums) * num_chains / len(plan.units[unit].ranks))[:, None])
        stages_by_role.append(slowest)
    return np.concatenate(stages_by_role, axis=1)
