"""Checks if global batches are large enough for the proportions that a plan was made for (Entrain, Alg. 2)."""

import math
from dataclasses import replace

import numpy as np

from megatron.runtime.flags.configuration import RunConfig
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.data.sample_source import SampleSource
from multimodal.plan.planners.entrain import LARGEST_BATCH, POOL_SIZE, stable_batch_size
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def describe_small_batch(config: RunConfig, source: SampleSource, *, graph: ModelGraph, plan: Plan) -> str | None:
    """Return a warning if the global batch is smaller than b_min, so that proportions of work change between batches.

    b_min is the least number of samples whose proportions of work always give units the same ranks. None if units share ranks,
    computations are waits from a table, or lengths are not known before samples are decoded.
    """
    units, batch_size = plan.units, config.training.global_batch_size
    num_replicas = math.gcd(*(unit.data_parallel_size for unit in units.values()))
    has_own_ranks = len(units) > 1 and sum(len(set(unit.ranks)) for unit in units.values()) == plan.num_ranks
    if (
        not has_own_ranks
        or config.training.emulate
        or config.data.lengths_from == "decode"
        or plan.num_ranks // num_replicas <= len(units)
    ):
        return None
    indices = np.linspace(0, len(source), min(len(source), POOL_SIZE), endpoint=False).astype(int).tolist()
    work = BatchWork(graph, [replace(source.lengths(index), sample_id=index) for index in indices], BalanceOptions())
    flops = {
        name: sum_floats_by(work.of_unit(name).samples, np.add(*work.flops(name)), len(indices)) for name in graph.unit_names
    }
    stable = stable_batch_size(flops, num_gpus=plan.num_ranks, data_parallel_size=num_replicas)
    if stable <= batch_size:
        return None
    shown = f"{LARGEST_BATCH} samples or more" if stable >= LARGEST_BATCH else f"{stable} samples"
    return (
        f"warning: the units' shares of the work differ from one global batch of {batch_size} samples to the next by more than a "
        f"rank; it takes {shown} for them to be stable (Entrain's b_min); raise --global-batch-size, or expect units to wait"
    )
