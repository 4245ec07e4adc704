"""Claim: encoders fill the bubbles of the LLM's pipeline, in an order found in less than a second of one core on 3,072 GPUs.

ViT-22B and GPT-175B, batch 1,536, strong scaling over 1,536, 2,048 and 3,072 GPUs (Optimus 5.2): the LLM has tp 8, pp 8 and 12
layer ranges per stage, microbatches of 2, whole layers recomputed, as in `published_setups/optimus.py`; the encoder may have any
sizes that fit, also over several ranks, and runs between and inside the LLM's computations. The cluster's computing speed is set
once, so that the step of Megatron-LM balanced on 1,536 GPUs is the published one (10.43 s): the one baseline whose
layout is published whole. Measured of each of `megatron`, `megatron-balanced` and `optimus`: the simulated step, and its bubbles
by kind; and of `optimus` the encoder's sizes that were found, the shares of its time in bubbles (docs/schedule.md), the bubbles
of the LLM alone, and the processor seconds in which the whole step is ordered. Published on 1,536 GPUs: 10.65, 10.43 and 9.80 s,
efficiency 34.3 % coarse and 57.5 % fine, 322 s for the order.

Run `python benchmarks/bubble_filling.py [--json] [--gpus 1536,2048,3072] [--repeats N]`.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.published_setups.optimus import BALANCED_SECONDS, BATCH_SIZE, setup_of
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from multimodal.cost.cluster import Cluster
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.search.prediction import prepare_step
from multimodal.plan.planners.search.simulated_part import keep_replicas
from multimodal.schedule.compile_schedule import component_of_lane
from multimodal.schedule.execute_lanes import unit_costs
from multimodal.schedule.simulate import BUBBLE_KINDS
from multimodal.values.sample_lengths import draw_length_batches
from multimodal.values.work.step_work import step_work
from tools.filling_report import Filling, measure_filling

PUBLISHED_SECONDS = {"megatron": 10.65, "megatron-balanced": 10.43, "optimus": 9.80}
"""Seconds of a step on 1,536 GPUs."""
GPUS_OF_REPLICA = 64
CLAIMED_SECONDS = 1.0


def measure(num_gpus: int, cluster: Cluster, repeats: int) -> dict[str, Any]:
    """Plan and simulate one number of GPUs with all three planners."""
    graph = read_model("vit-22b-gpt-175b")
    replicas = num_gpus // GPUS_OF_REPLICA
    found: dict[str, Any] = {"num_gpus": num_gpus}
    for planner in PUBLISHED_SECONDS:
        setup = setup_of(planner, graph, data_parallel_size=replicas)
        run = setup.plan(cluster)
        prediction = setup.predict(run, cluster)
        found[planner] = {
            "iteration_seconds": prediction.iteration_seconds,
            "peak_memory_bytes": prediction.peak_memory_bytes,
            "bubble": dict(prediction.bubble),
            "units": {name: unit.describe_sizes() for name, unit in run.plan.units.items()},
        }
        if planner == "optimus":
            found[planner] |= fill(setup, run, cluster, repeats)
    return found


def fill(setup: Setup, run: PlannedRun, cluster: Cluster, repeats: int) -> dict[str, Any]:
    """Time the ordering of a whole step, and describe how the encoders fill one LLM pipeline; the others are alike."""
    request = setup.request(cluster)
    (batch,) = draw_length_batches(request.lengths, batch_size=BATCH_SIZE, num_batches=1, seed=0)
    seconds = []
    for _ in range(repeats):
        whole = prepare_step(run, request, run.plan, batch)
        for cached in (step_work, unit_costs, component_of_lane):
            cached.cache_clear()
        started = time.process_time()
        whole.builder(whole.shape)
        seconds.append(time.process_time() - started)
    share = run.plan.units["llm"].data_parallel_size
    part = prepare_step(run, request, keep_replicas(run.plan, share) or run.plan, batch[::share])
    filling = measure_filling(part.builder, part.shape, part.costs, passes=part.passes)
    assert filling is not None
    return {"scheduler_seconds": min(seconds), "schedule": run.schedule, **describe(filling)}


def describe(filling: Filling) -> dict[str, Any]:
    """Return the shares that are filled, and the bubbles of the LLM's pipeline alone."""
    return {
        "eff_coarse": filling.eff_coarse,
        "eff_fine": filling.eff_fine,
        "seconds_alone": filling.alone.iteration_seconds,
        "bubble_alone": dict(filling.alone.bubble),
    }


def print_tables(results: list[dict[str, Any]]) -> None:
    """Print the steps and bubbles of all planners, and the filling by `optimus`."""
    console = Console(width=160, highlight=False)
    steps = Table("GPUs", "planner", "step", "of megatron", "of balanced", "published", *BUBBLE_KINDS, "GB", box=None)
    filled = Table("GPUs", "eff_coarse", "eff_fine", "ordered in", "encoder", box=None)
    for found in results:
        for planner, published in PUBLISHED_SECONDS.items():
            own = found[planner]
            seconds = own["iteration_seconds"]
            steps.add_row(
                str(found["num_gpus"]),
                planner,
                f"{seconds:.2f} s",
                f"{seconds / found['megatron']['iteration_seconds']:.3f}",
                f"{seconds / found['megatron-balanced']['iteration_seconds']:.3f}",
                f"{published:.2f} s" if found["num_gpus"] == BATCH_SIZE else "",
                *_shares(own["bubble"]),
                f"{own['peak_memory_bytes'] / 1e9:.0f}",
            )
        own = found["optimus"]
        alone = f"{own['seconds_alone']:.2f} s"
        steps.add_row(str(found["num_gpus"]), "LLM alone", alone, "", "", "", *_shares(own["bubble_alone"]), "")
        filled.add_row(
            str(found["num_gpus"]),
            f"{own['eff_coarse']:.1%}",
            f"{own['eff_fine']:.1%}",
            f"{own['scheduler_seconds']:.2f} s",
            own["units"]["vision"],
        )
    console.print(steps)
    console.print(filled)


def _shares(bubble: Mapping[str, float]) -> list[str]:
    return [f"{bubble[kind]:.1%}" for kind in BUBBLE_KINDS]


def main() -> int:
    """Return 1 if ordering takes longer than claimed, or if the step is not shorter than those of both baselines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default="1536,2048,3072", help="Numbers of GPUs, multiples of 64 (1536,2048,3072).")
    parser.add_argument("--repeats", type=int, default=3, help="Times that a step is ordered; the fastest counts (3).")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    flags = parser.parse_args()
    balanced = setup_of("megatron-balanced", read_model("vit-22b-gpt-175b"), data_parallel_size=BATCH_SIZE // GPUS_OF_REPLICA)
    cluster = balanced.calibrate(read_cluster("h100"), measured_seconds=BALANCED_SECONDS)
    results = [measure(int(count), cluster, flags.repeats) for count in flags.gpus.split(",")]
    if flags.json:
        print(json.dumps(results))
    else:
        print_tables(results)
    is_fast = all(each["optimus"]["scheduler_seconds"] < CLAIMED_SECONDS for each in results)
    is_shorter = all(
        each["optimus"]["iteration_seconds"] <= min(each[name]["iteration_seconds"] for name in PUBLISHED_SECONDS)
        for each in results
    )
    return 0 if is_fast and is_shorter else 1


if __name__ == "__main__":
    sys.exit(main())
