"""Entrain: Qwen2.5-VL's encoder with Llama 1B and 3B on 64 A40, TP 2, DP 4, microbatch 4, batch 512; against DistTrain and DIP.

No absolute figure is published, so `a40.yaml` is used as it is. The paper's four data sets are not public as lengths; four real
ones stand for them. Entrain runs eager 1F1B with split backwards (4.5.3), DistTrain 1F1B, and DIP its own schedule with both
units on all ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.published_setups.length_files import IMAGES, read_lengths
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.cost.cluster import Cluster
from multimodal.data.length_batches import draw_length_batches
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.profiling_batch import gpu_block, sample_work, stable_batch_size
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.sample_lengths import SampleLengths

NUM_GPUS, TENSOR_PARALLEL_SIZE, DATA_PARALLEL_SIZE, MICRO_BATCH_SIZE, BATCH_SIZE = 64, 2, 4, 4, 512
UP_TO, LARGEST_PROFILING_BATCH = 1.40, 256
SIZES = FixedSizes(tensor_parallel_size=TENSOR_PARALLEL_SIZE, data_parallel_size=DATA_PARALLEL_SIZE)


def rows(folder: Path) -> Iterator[Row]:
    """Compare the three systems on every data set."""
    cluster = read_cluster("a40")
    gains: list[float] = []
    batches: list[int] = []
    for model in ("1b", "3b"):
        for name in IMAGES:
            setup = _setup(model, name, folder)
            run = setup.plan(cluster)
            eager = replace(run, schedule="eager-1f1b", passes=(*run.passes, "split-backward"))
            entrain = setup.predict(eager, cluster).iteration_seconds
            baselines = {"DistTrain": _disttrain_seconds(setup, cluster), "DIP": _dip_seconds(setup, cluster)}
            for baseline, seconds in baselines.items():
                gains.append(seconds / entrain)
                yield Row(
                    "Entrain", f"{model.upper()}, {name}, over {baseline}", (1.0, UP_TO), gains[-1], "abstract", is_bound=True
                )
            batches.append(_profiling_batch(setup, cluster))
    yield Row("Entrain", "largest gain over either", single(UP_TO), max(gains), "abstract")
    limits = (1, LARGEST_PROFILING_BATCH)
    yield Row("Entrain", "largest of the minimum profiling batches", limits, max(batches), "C.5", "samples")


def _setup(model: str, name: str, folder: Path) -> Setup:
    graph = read_model(f"entrain-llama-{model}")
    samples: tuple[SampleLengths, ...] = next(
        draw_length_batches(read_lengths(folder, name, graph=graph), batch_size=2 * BATCH_SIZE, num_batches=1, seed=0)
    )
    sizes = dict.fromkeys(graph.unit_names, SIZES)
    return Setup("entrain", graph, samples, NUM_GPUS, BATCH_SIZE, sizes, micro_batch_size=MICRO_BATCH_SIZE)


def _disttrain_seconds(setup: Setup, cluster: Cluster) -> float:
    return replace(setup, planner="disttrain").simulate(cluster).iteration_seconds


def _dip_seconds(setup: Setup, cluster: Cluster) -> float:
    """Both units over all ranks, eight stages each."""
    stages = NUM_GPUS // TENSOR_PARALLEL_SIZE // DATA_PARALLEL_SIZE
    sizes = dict.fromkeys(
        setup.graph.unit_names, UnitSizes(tensor_parallel_size=TENSOR_PARALLEL_SIZE, pipeline_parallel_size=stages)
    )
    plan = plan_colocated(setup.graph, sizes=sizes, world_size=NUM_GPUS)
    run = PlannedRun("dip", plan, schedule="dip", passes=setup.passes, micro_batch_size=MICRO_BATCH_SIZE)
    return setup.predict(run, cluster).iteration_seconds


def _profiling_batch(setup: Setup, cluster: Cluster) -> int:
    request = setup.request(cluster)
    return stable_batch_size(
        sample_work(request), num_gpus=NUM_GPUS, data_parallel_size=DATA_PARALLEL_SIZE, block=gpu_block(request)
    )
