"""Claim: what `auto` and `--plan auto` are predicted to gain over packed samples in the data's order, real steps gain.

Eight processes run the real executor, broker and messages, with timed waits as computations: a vision encoder with 2 replicas of
one stage and an LLM with 2 replicas of 3 stages, under 1F1B, as a user of megatron-core's MIMO would lay them out, with packed
microbatches. `auto` places the samples of the same batches of real lengths (generated ones where there are none) under the same
plan; `--plan auto` is what its search makes for eight ranks, with its own schedule, balancer and microbatches. Waits are those of
the cost model for a node of H100 that is slower in everything. Measured and predicted seconds, and the gain, side by side.

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
from multimodal.data.length_table import MOST_SAMPLES, read_length_table
from multimodal.plan.planners import PLANNERS, plan_or_advise
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import passes_named
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, draw_length_batches

SIZES = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(data_parallel_size=2, pipeline_parallel_size=3)}
GLOBAL_BATCH_SIZE, NUM_MICROBATCHES, SCHEDULE, NUM_RANKS = 32, 8, "1f1b", 8
TARGET_SECONDS = 6.0
"""Seconds of a step in the data's order: long enough that this machine's own work is small beside the waits."""


def emulate_batch(lengths: Sequence[SampleLengths], cluster: Cluster, planned: PlannedRun) -> dict[str, dict[str, float]]:
    """Return run -> measured and predicted seconds."""
    graph = ModelGraph.from_dict({"units": MODEL})
    by_hand = PlannedRun(plan_disaggregated(graph, sizes=SIZES, world_size=NUM_RANKS), schedule=SCHEDULE, micro_batch_size=2)
    found = {}
    for name, run in {"none": by_hand, "auto": replace(by_hand, balance="auto"), "--plan auto": planned}.items():
        schedules = ScheduleCache(graph, run.plan, BUILDERS[run.schedule], passes_named(",".join(run.passes)))
        predictor = StepPredictor(schedules, cluster, VOCAB_SIZE)
        options = BalanceOptions(
            micro_batch_size=run.micro_batch_size,
            encoder_micro_batch_sizes=dict(run.encoder_micro_batch_sizes),
            vocab_size=VOCAB_SIZE,
            predictor=predictor,
        )
        assignment = BALANCERS[run.balance](lengths, graph=graph, plan=run.plan, options=options)
        shape = schedules.shape(assignment)
        costs = ModelCosts(shape, assignment, lengths, cluster, VOCAB_SIZE)
        schedule = schedules.find(shape, costs).to_run(costs)
        timelines = emulate(EmulatedRun(schedule, assignment, costs, num_iterations=3))
        found[name] = {
            "predicted": simulate_schedule(schedule, costs).iteration_seconds,
            "measured": statistics.median(timeline.duration_seconds for timeline in timelines),
        }
    return found


def plan_auto(samples: Sequence[SampleLengths], cluster: Cluster) -> PlannedRun:
    """Return what the search of `--plan auto` chooses for these samples."""
    graph = ModelGraph.from_dict({"units": MODEL})
    request = PlanningRequest(
        graph, cluster, NUM_RANKS, GLOBAL_BATCH_SIZE, tuple(samples), vocab_size=VOCAB_SIZE, sharding="optim"
    )
    return plan_or_advise(PLANNERS["braid"], request).run


def slow_cluster(lengths: Sequence[SampleLengths]) -> Cluster:
    """Return a node of H100 on which everything is slower, so that the step of these samples takes about TARGET_SECONDS."""
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=NUM_RANKS)
    options = BalanceOptions(num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE)
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=options)
    predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS[SCHEDULE]), cluster, VOCAB_SIZE)
    speed = predictor.predict(assignment, lengths).seconds / TARGET_SECONDS
    link, memory = cluster.intra_node, cluster.memory_bandwidth_gbytes_per_second
    assert memory is not None
    return replace(
        cluster,
        peak_tflops=cluster.peak_tflops * speed,
        memory_bandwidth_gbytes_per_second=memory * speed,
        intra_node=replace(
            link,
            bandwidth_gbytes_per_second=link.bandwidth_gbytes_per_second * speed,
            latency_us=link.latency_us / speed,
        ),
    )


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
    planned = plan_auto(samples[:MOST_SAMPLES], slow_cluster(batches[0]))
    sizes = ", ".join(f"{unit} {each.describe_sizes()} on ranks {each.ranks}" for unit, each in planned.plan.units.items())
    print(f"--plan auto: {sizes}; {' '.join((planned.flags, *planned.encoder_flags))}", file=sys.stderr)
    results = [emulate_batch(lengths, slow_cluster(lengths), planned) for lengths in batches]
    print(json.dumps(results)) if given.json else print_table(results)
    return 0


def print_table(results: Sequence[dict[str, Any]]) -> None:
    """Print one row per batch and run."""
    table = Table("batch", "run", "measured", "predicted", "gain: measured (predicted)", box=None)
    for index, found in enumerate(results):
        measured, predicted = found["none"]["measured"], found["none"]["predicted"]
        for name, each in found.items():
            gain = f"{measured / each['measured']:.3f}x ({predicted / each['predicted']:.3f}x)"
            table.add_row(str(index), name, f"{each['measured']:.3f} s", f"{each['predicted']:.3f} s", gain)
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
