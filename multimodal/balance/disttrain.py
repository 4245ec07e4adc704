"""Balances as DistTrain does: samples over replicas by their whole work, microbatches in an order that keeps pipelines full."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.reorder_microbatches import reorder_microbatches
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, read_batch
from multimodal.balance.placement import Replicas, cut_evenly, follow_llm
from multimodal.values.assignment import Assignment, Microbatch
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
    bins = partition_longest_first([work.whole_sample_flops(sample) for sample in work.samples], num_bins=num_replicas)
    count = options.count_microbatches(len(work.samples), num_replicas=num_replicas)
    replicas = tuple(
        cut_evenly([work.samples[index] for index in sorted(members)], [1] * len(members), count=count) for members in bins
    )
    return follow_llm(reorder_llm(replicas, work, plan=plan), work, plan=plan)


def reorder_llm(llm: Replicas, work: BatchWork, *, plan: Plan) -> Replicas:
    """Put each replica's microbatches into the order in which its pipeline waits least (DistTrain, Alg. 3)."""
    return tuple(_reorder(microbatches, work, plan=plan) for microbatches in llm)


def _reorder(microbatches: Sequence[Microbatch], work: BatchWork, *, plan: Plan) -> tuple[Microbatch, ...]:
    if len(microbatches) < 3:  # the first stays first, and of the rest there must be a choice
        return tuple(microbatches)
    stage_seconds = [_stage_seconds(work, microbatch, plan=plan) for microbatch in microbatches]
    forward, backward = np.stack(stage_seconds, axis=2)
    order = reorder_microbatches(forward, backward_seconds=backward, num_stages=len(forward))
    return tuple(microbatches[index] for index in order)


def _stage_seconds(work: BatchWork, microbatch: Microbatch, *, plan: Plan) -> npt.NDArray[np.float64]:
    """[2, num_stages]: forward and backward of one microbatch in each stage of one chain: encoders, LLM, generators.

    Seconds at equal speed of all ranks. Units of the same role run side by side, so the slowest counts in each stage; a unit with
    fewer replicas than the LLM takes several chains' microbatches in turn, which makes it as much slower.
    """
    num_chains = plan.units[work.graph.backbone.name].data_parallel_size
    atoms_by_unit = work.atoms_by_unit(microbatch)
    stages_by_role = []
    for role in (Role.ENCODER, Role.BACKBONE, Role.GENERATOR):
        units = [unit.name for unit in work.graph.units if unit.role is role]
        num_stages = max((len(plan.units[unit].replicas[0].stages) for unit in units), default=0)
        slowest = np.zeros((2, num_stages))
        for unit in units:
            flops = np.array(work.flops(unit, atoms_by_unit[unit]))
            slowest = np.maximum(slowest, (flops * num_chains / len(plan.units[unit].ranks))[:, None])
        stages_by_role.append(slowest)
    return np.concatenate(stages_by_role, axis=1)
