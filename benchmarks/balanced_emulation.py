"""Claim: what `auto` is predicted to gain over the data's own order, it gains when the step really runs.

Eight processes run the real executor, broker and messages, with timed waits as computations: a vision encoder with 2 replicas of
one stage and an LLM with 2 replicas of 3 stages. Both balancers place the same batches of real lengths (generated ones where
there are none); waits are those of the cost model on a machine that is slow enough for this one. Measured and predicted seconds,
and the gain, side by side.

Run `python benchmarks/balanced_emulation.py [--lengths L.csv.gz] [--num-batches N] [--json]`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.balanced_iteration import LENGTHS, MODEL, ROOT, VOCAB_SIZE, long_tailed
from megatron.runtime.emulation.emulated_run import EmulatedRun, emulate
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.data.length_table import read_length_table
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

SIZES = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(data_parallel_size=2, pipeline_parallel_size=3)}
GLOBAL_BATCH_SIZE, NUM_MICROBATCHES, SCHEDULE = 32, 8, "eager-1f1b"
TARGET_SECONDS = 3.0
"""Seconds of a step in the data's order: long enough that this machine's own work is small beside the waits."""


def emulate_batch(lengths: Sequence[SampleLengths], cluster: Cluster) -> dict[str, dict[str, float]]:
    """Return balancer -> measured and predicted seconds."""
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=8)
    found = {}
    for name in ("none", "auto"):
        predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS[SCHEDULE]), cluster, VOCAB_SIZE)
        options = BalanceOptions(num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE, predictor=predictor)
        assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
        shape = assignment.shape(graph, plan)
        schedule = build_schedule(BUILDERS[SCHEDULE], shape)
        costs = ModelCosts(shape, assignment, lengths, cluster, VOCAB_SIZE)
        predicted = simulate_schedule(schedule, costs).iteration_seconds
        timelines = emulate(EmulatedRun(schedule, assignment, costs, num_iterations=3))
        found[name] = {
            "predicted": predicted,
            "measured": statistics.median(timeline.duration_seconds for timeline in timelines),
        }
    return found


def slow_cluster(lengths: Sequence[SampleLengths]) -> Cluster:
    """Return a cluster on which the step of these samples takes about TARGET_SECONDS."""
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=8)
    options = BalanceOptions(num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE)
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=options)
    predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS[SCHEDULE]), cluster, VOCAB_SIZE)
    return replace(cluster, peak_tflops=cluster.peak_tflops * predictor.predict(assignment, lengths).seconds / TARGET_SECONDS)


def main(argv: Sequence[str]) -> int:
    """Emulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=LENGTHS / "mathvision.csv.gz", metavar="L.csv.gz")
    parser.add_argument("--num-batches", type=int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    graph = ModelGraph.from_dict({"units": MODEL})
    samples = read_length_table(given.lengths, graph=graph) if given.lengths.is_file() else long_tailed()
    batches = list(draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=given.num_batches, seed=0))
    results = [emulate_batch(lengths, slow_cluster(lengths)) for lengths in batches]
    print(json.dumps(results)) if given.json else print_table(results)
    return 0


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print one row per batch."""
    table = Table("batch", "none: measured (predicted)", "auto: measured (predicted)", "gain: measured (predicted)", box=None)
    for index, found in enumerate(results):
        none, auto = found["none"], found["auto"]
        cells = [f"{each['measured']:.3f} s ({each['predicted']:.3f})" for each in (none, auto)]
        gain = f"{none['measured'] / auto['measured']:.3f}x ({none['predicted'] / auto['predicted']:.3f}x)"
        table.add_row(str(index), *cells, gain)
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
