"""Balances as DistTrain does: samples over replicas by their whole work, microbatches in an order that keeps pipelines full."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.encoder_placement import Replicas, cut_evenly
from multimodal.balance.post_balancing import follow_llm
from multimodal.balance.reorder_microbatches import reorder_microbatches
from multimodal.balance.reorder_samples import reorder_samples
from multimodal.balance.validate_inputs import validate_inputs
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def balance_disttrain(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Reorder samples over the LLM's replicas (DistTrain, Alg. 2), then each replica's microbatches (Alg. 3).

    A sample weighs what it asks of all units together, and stays whole: encoders take the items of the LLM's microbatches as
    they come. Inside a replica, microbatches of equally many samples are cut in the order of their ids and then reordered.

    The result does not depend on the order of `lengths`. Raises AssignmentError as `validate_inputs` does.
    """
    validate_inputs(lengths, graph=graph, options=options)
    work = BatchWork(graph, lengths, options)
    num_replicas = plan.units[graph.backbone.name].data_parallel_size
    samples = [Atom(sample_id) for sample_id in work.lengths_by_sample]
    bins = reorder_samples([work.whole_flops(sample) for sample in samples], num_groups=num_replicas)
    count = options.count_microbatches(len(samples), num_replicas=num_replicas)
    replicas = tuple(
        cut_evenly([samples[index] for index in sorted(members)], [1] * len(members), count=count) for members in bins
    )
    return follow_llm(reorder_llm(replicas, work, plan=plan), work, plan=plan)


def reorder_llm(llm: Replicas, work: BatchWork, *, plan: Plan) -> Replicas:
    """Put each replica's microbatches into the order in which its pipeline waits least (DistTrain, Alg. 3)."""
    return tuple(_reorder(microbatches, work, plan=plan) for microbatches in llm)


def _reorder(microbatches: Sequence[Microbatch], work: BatchWork, *, plan: Plan) -> tuple[Microbatch, ...]:
    if len(microbatches) < 3:  # the first stays first, and of the rest there must be a choice
        return tuple(microbatches)
    stage_seconds = [_chain_seconds(work, microbatch, plan=plan) for microbatch in microbatches]
    forward, backward = np.stack(stage_seconds, axis=2)
    order = reorder_microbatches(forward, backward_seconds=backward, num_stages=len(forward))
    return tuple(microbatches[index] for index in order)


def _chain_seconds(work: BatchWork, microbatch: Microbatch, *, plan: Plan) -> npt.NDArray[np.float64]:
    """[2, num_stages]: forward and backward of one microbatch in each stage of one chain: encoders, LLM, generators.

    Seconds at equal speed of all ranks. Units of the same role run side by side, so the slowest counts in each stage; a unit with
    fewer replicas than the LLM takes several chains' microbatches in turn, which makes it as much slower.
    """
    chains = plan.units[work.graph.backbone.name].data_parallel_size
    parts = []
    for role in (Role.ENCODER, Role.BACKBONE, Role.GENERATOR):
        units = [unit.name for unit in work.graph.units if unit.role is role]
        depth = max((len(plan.units[unit].replicas[0].stages) for unit in units), default=0)
        slowest = np.zeros((2, depth))
        for unit in units:
            flops = np.array(work.flops(unit, work.parts(microbatch)[unit]))
            slowest = np.maximum(slowest, (flops * chains / len(plan.units[unit].ranks))[:, None])
        parts.append(slowest)
    return np.concatenate(parts, axis=1)
