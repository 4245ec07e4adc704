"""Entrain: Qwen2.5-VL's encoder with Llama 1B and 3B on 64 A40, TP 2, DP 4, microbatch 4, batch 512; against DistTrain and DIP.

No absolute figure is published, so `a40.yaml` is used as it is. The paper's four data sets are not public as lengths; four real
ones stand for them. Entrain and DistTrain run 1F1B, as in the evaluation (4.5.3 describes eager 1F1B), with the stages that
their planners choose, and DIP its own schedule with both units on all ranks. The evaluation had 16 GPUs and ran the replicas in
turn; here all run at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.baselines.entrain import gpu_block, sample_work
from benchmarks.published_setups.layer_execution import AttentionWindow, LayerExecution
from benchmarks.published_setups.length_files import IMAGES, read_lengths
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.prediction import assign
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.plan.stable_batch import stable_batch_size
from multimodal.values.action import Action, ActionKind
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

NUM_GPUS, TENSOR_PARALLEL_SIZE, DATA_PARALLEL_SIZE, MICRO_BATCH_SIZE, BATCH_SIZE = 64, 2, 4, 4, 512
UP_TO, LARGEST_PROFILING_BATCH, DEVIATION_RATIO, WORK_RATIO = 1.40, 256, 10.6, 2.43
SIZES = FixedSizes(tensor_parallel_size=TENSOR_PARALLEL_SIZE, data_parallel_size=DATA_PARALLEL_SIZE)
EXECUTION = LayerExecution(windows=(AttentionWindow("vision", num_tokens=64, full_share=4 / 32),))
"""Qwen2.5-VL's encoder attends inside windows of 8 x 8 patches in 28 of its 32 layers."""
ENCODER_STAGES: Mapping[tuple[str, str], int] = {
    ("1b", "coco_llava_descriptions"): 4,
    ("1b", "chartqa_augmented"): 5,
    ("1b", "coco_caption_val2017"): 5,
    ("3b", "coco_llava_descriptions"): 3,
    ("3b", "chartqa_augmented"): 4,
    ("3b", "coco_caption_val2017"): 4,
}
"""Table C.1, Entrain on LLaVA-150k, ChartQA and CocoQA: (model, data) -> the encoder's stages of eight. The lengths of the fourth
data set, SynthChartNet (5 and 4 stages), are not at hand."""


def rows(folder: Path) -> Iterator[Row]:
    """Compare the three systems on every data set."""
    cluster = read_cluster("a40")
    gains: list[float] = []
    batches: list[int] = []
    deviations: list[float] = []
    for model in ("1b", "3b"):
        for name in IMAGES:
            setup = _setup(model, name, folder)
            run = replace(setup.plan(cluster), schedule="1f1b", passes=setup.passes)
            if published := ENCODER_STAGES.get((model, name)):
                found = len(run.plan.units["vision"].replicas[0].stages)
                what = f"{model.upper()}, {name}, encoder's stages of eight"
                yield Row("Entrain", what, single(published), found, "Table C.1", "stages")
            runs = {"DistTrain": replace(setup, planner="disttrain").plan(cluster), "DIP": _dip_run(setup)}
            ours = setup.predict(run, cluster).iteration_seconds
            spread = _microbatch_spread(setup, run, cluster)
            for baseline, other in runs.items():
                gains.append(setup.predict(other, cluster).iteration_seconds / ours)
                what = f"{model.upper()}, {name}, over {baseline}"
                yield Row("Entrain", what, (1.0, UP_TO), gains[-1], "abstract", is_bound=True)
                wider = _microbatch_spread(setup, other, cluster)
                deviations += [wider[unit] / spread[unit] for unit in setup.graph.unit_names]
            batches.append(_profiling_batch(setup, cluster))
    yield Row("Entrain", "largest gain over either", single(UP_TO), max(gains), "abstract")
    limits = (1, LARGEST_PROFILING_BATCH)
    yield Row("Entrain", "largest of the minimum profiling batches", limits, max(batches), "C.5", "samples")
    what = "deviation of microbatch times, largest reduction"
    elsewhere = "it is the encoder's on SynthChartNet, from 208.07 to 19.60 ms, whose lengths are not at hand"
    yield Row("Entrain", what, single(DEVIATION_RATIO), max(deviations), "abstract", not_counted=elsewhere)
    work = sample_work(_setup("1b", "coco_llava_descriptions", folder).request(cluster))
    ratio = float(work["vision"].mean() / work["llm"].mean())
    yield Row("Entrain", "1B, coco_llava_descriptions, encoder's work over the LLM's", single(WORK_RATIO), ratio, "Figure 4.5")


def _setup(model: str, name: str, folder: Path) -> Setup:
    graph = read_model(f"entrain-llama-{model}")
    samples: tuple[SampleLengths, ...] = next(
        draw_length_batches(read_lengths(folder, name, graph=graph), batch_size=2 * BATCH_SIZE, num_batches=1, seed=0)
    )
    sizes = dict.fromkeys(graph.unit_names, SIZES)
    return Setup("entrain", graph, samples, NUM_GPUS, BATCH_SIZE, sizes, micro_batch_size=MICRO_BATCH_SIZE, execution=EXECUTION)


def _microbatch_spread(setup: Setup, run: PlannedRun, cluster: Cluster) -> dict[str, float]:
    """Unit -> standard deviation of its microbatches' forward seconds over their mean, averaged over replicas."""
    request = setup.request(cluster)
    lengths = tuple(setup.lengths)[:BATCH_SIZE]
    assignment = assign(run, request, run.plan, lengths)
    options = request.run_options(run)
    costs = ModelCosts(assignment.shape(setup.graph, run.plan), assignment, lengths, cluster, request.vocab_size, options)
    return {
        unit: float(np.mean([_relative_deviation(costs, unit, replica) for replica in range(DATA_PARALLEL_SIZE)]))
        for unit in setup.graph.unit_names
    }


def _relative_deviation(costs: ModelCosts, unit: str, replica: int) -> float:
    count = costs.shape.num_microbatches(unit, replica)
    seconds = [costs.compute(Action(ActionKind.FORWARD, unit, replica, 0, index)).seconds for index in range(count)]
    return float(np.std(seconds) / np.mean(seconds))


def _dip_run(setup: Setup) -> PlannedRun:
    """Both units over all ranks, eight stages each."""
    stages = NUM_GPUS // TENSOR_PARALLEL_SIZE // DATA_PARALLEL_SIZE
    sizes = dict.fromkeys(
        setup.graph.unit_names, UnitSizes(tensor_parallel_size=TENSOR_PARALLEL_SIZE, pipeline_parallel_size=stages)
    )
    plan = plan_colocated(setup.graph, sizes=sizes, world_size=NUM_GPUS)
    return PlannedRun(plan, planner="dip", schedule="dip", passes=setup.passes, micro_batch_size=MICRO_BATCH_SIZE)


def _profiling_batch(setup: Setup, cluster: Cluster) -> int:
    request = setup.request(cluster)
    return stable_batch_size(sample_work(request), num_gpus=NUM_GPUS // DATA_PARALLEL_SIZE // gpu_block(request))
