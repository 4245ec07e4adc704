"""Claim: planning takes DistTrain's Algorithm 1 at most 100 ms on its four clusters, exactly, and `braid` 60 s on 3,072 GPUs.

All planners together plan for 10,240 GPUs in 300 s on two cores, each in at most 2 GB (`--planners`).

DistTrain reports 133, 441, 641 and 922 ms on 112, 324, 648 and 1,296 GPUs (global batch 1,920, the 72B model), with a
convex solver for each parallelism. Here the problem is solved in closed form, which bounds the search for whole numbers of GPUs.

- `disttrain`: processor milliseconds of the whole planner, the best of `--repeats`.
- its objective against an exhaustive search over every tp, dp and pp of all three units: row by row of the LLM and encoder, all
  rows of the generator at once. On more than 112 GPUs that is too much, and the encoder's and generator's rows are first thinned
  to those that no other row beats in all columns.
- the closed form against a general solver (HiGHS on the equivalent linear program) on the same allocation problems.
- `braid`: wall-clock seconds on 3,072 GPUs (ViT-22B and GPT-175B, batch 1,536, Optimus' strong scaling), its budget included.
- `--planners`: processor seconds and peak memory of every planner, each in a process of its own, tuned and judged as
  `tools/plan.py` does (Qwen2.5-VL-7B on H100s, two samples a GPU).

Run `python benchmarks/planning.py [--json] [--repeats N] [--skip-braid] [--skip-exhaustive] [--planners [NAME ...]]`.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog

from benchmarks.baselines import COMPARED
from benchmarks.baselines.disttrain import plan_disttrain
from multimodal.cost.cluster import Cluster
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners import PLANNERS, TEMPLATE_PLANNERS
from multimodal.plan.planners.estimate.unit_options import UnitOptions, pareto_rows
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.allocation import (
    AllocationProblem,
    build_problem,
    least_bottleneck,
    rank_allocations,
)
from multimodal.values.model_graph import ModelGraph

EXAMPLES = Path(__file__).parents[1] / "examples"
PUBLISHED_MS = {112: 133, 324: 441, 648: 641, 1296: 922}
CLAIMED_MS = 100
CLAIMED_BRAID_SECONDS = 60
MANY_GPUS, CLAIMED_SECONDS_OF_ALL, CLAIMED_MB = 10_240, 2 * 300, 2000


def disttrain_request(num_gpus: int) -> PlanningRequest:
    """Return a request for MLLM-72B on A800 nodes: 8,192 tokens per sample, one input image and one generated image."""
    graph = ModelGraph.from_file(EXAMPLES / "models" / "mllm-72b.yaml")
    lengths = uniform_lengths(graph, tokens={"vision": 1024, "llm": 8192, "generator": 256}, num_samples=1)
    cluster = Cluster.from_file(EXAMPLES / "clusters" / "a800.yaml")
    vocab_size = graph.backbone.vocab_size or 128256
    return PlanningRequest(graph, cluster, num_gpus, 1920, lengths, vocab_size=vocab_size)


def braid_request(budget_seconds: float) -> PlanningRequest:
    """Return a request for ViT-22B and GPT-175B on 3,072 Hopper GPUs."""
    graph = ModelGraph.from_file(EXAMPLES / "models" / "vit-22b-gpt-175b.yaml")
    lengths = uniform_lengths(graph, tokens={"vision": 2048, "llm": 2048 + 512}, num_samples=1)
    cluster = Cluster.from_file(EXAMPLES / "clusters" / "h100.yaml")
    return PlanningRequest(graph, cluster, 3072, 1536, lengths, time_budget_seconds=budget_seconds)


def processor_ms(request: PlanningRequest, repeats: int) -> float:
    """Return the best time of the planner; each repetition has a fresh request, so that no result is cached."""
    best = float("inf")
    for _ in range(repeats):
        fresh = disttrain_request(request.num_gpus)
        start = time.process_time()
        plan_disttrain(fresh)
        best = min(best, time.process_time() - start)
    return best * 1e3


def exhaustive_seconds(problem: AllocationProblem, *, is_thinned: bool) -> float:
    """Return the best objective over every combination of rows, of the two units beside the LLM as listed or thinned."""
    vision, generator = (
        _thinned(options, name in problem.upstream) if is_thinned else options for name, options in problem.others.items()
    )
    llm, best = problem.llm, float("inf")
    gen_stage, gen_chain = generator.stage_seconds / generator.data, generator.chain_seconds / generator.data
    behind = generator.data * generator.pipeline
    for row in range(len(llm)):
        data, in_flight = float(llm.data[row]), float(llm.data[row] * llm.pipeline[row])
        for index in range(len(vision)):
            stage, chain = vision.stage_seconds[index] / vision.data[index], vision.chain_seconds[index] / vision.data[index]
            slowest = np.maximum(llm.stage_seconds[row], data * np.maximum(stage, gen_stage))
            steady = (problem.request.num_microbatches / data - 1) * slowest
            seconds = llm.chain_seconds[row] + data * (chain + gen_chain) + steady
            is_possible = (
                (llm.gpus[row] + vision.gpus[index] + generator.gpus <= problem.request.num_gpus)
                & (behind <= llm.in_flight_downstream[row])
                & (vision.in_flight_downstream[index] >= in_flight + behind)
            )
            best = min(best, float(np.min(seconds, where=is_possible, initial=np.inf)))
    return best


def _thinned(options: UnitOptions, is_encoder: bool) -> UnitOptions:
    limit = -options.in_flight_downstream if is_encoder else (options.data * options.pipeline).astype(np.float64)
    return options.take(
        pareto_rows(options.gpus, options.stage_seconds / options.data, options.chain_seconds / options.data, limit)
    )


def compare_solvers(count: int = 200) -> dict[str, float]:
    """Time the closed form and a general solver on the same random problems of three units, and compare their optima."""
    draw = Random(0)
    problems = [
        ([draw.uniform(1, 100) for _ in range(3)], [draw.choice((1.0, 2.0, 4.0, 8.0)) for _ in range(3)], draw.uniform(24, 1296))
        for _ in range(count)
    ]
    start = time.process_time()
    closed = [least_bottleneck(work, num_gpus=gpus, minimums=least) for work, least, gpus in problems]
    middle = time.process_time()
    general = [_linear_program(work, least, gpus) for work, least, gpus in problems]
    end = time.process_time()
    return {
        "closed_form_us": (middle - start) / count * 1e6,
        "general_solver_us": (end - middle) / count * 1e6,
        "largest_relative_difference": max(abs(a - b) / b for a, b in zip(closed, general, strict=True)),
    }


def _linear_program(work: list[float], minimums: list[float], num_gpus: float) -> float:
    """Maximise s = 1 / t with work_i s <= x_i and sum(x) <= N."""
    count = len(work)
    matrix = np.zeros((count + 1, count + 1))
    matrix[:count, 0], matrix[:count, 1:], matrix[count, 1:] = work, -np.eye(count), 1.0
    limits = [*[0.0] * count, num_gpus]
    bounds = [(0, None), *((least, None) for least in minimums)]
    return -1 / linprog([-1.0, *[0.0] * count], A_ub=matrix, b_ub=limits, bounds=bounds, method="highs").fun


def measure_planner(name: str) -> dict[str, Any]:
    """Plan for `MANY_GPUS` in this process."""
    graph = ModelGraph.from_file(EXAMPLES / "models" / "qwen2.5-vl-7b.yaml")
    lengths = uniform_lengths(graph, tokens={"vision": 1500, "llm": 1500}, num_samples=1)
    cluster = Cluster.from_file(EXAMPLES / "clusters" / "h100.yaml")
    request, start = PlanningRequest(graph, cluster, MANY_GPUS, 2 * MANY_GPUS, lengths), time.process_time()
    if name in TEMPLATE_PLANNERS:
        TEMPLATE_PLANNERS[name](request, fault_tolerance=1)
    step = COMPARED[name].plan_best(request).prediction.iteration_seconds if name in COMPARED else None
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"planner": name, "seconds": time.process_time() - start, "peak_mb": peak_mb, "iteration_seconds": step}


def measure_braid() -> dict[str, Any]:
    """Time one search."""
    start = time.perf_counter()
    run = PLANNERS["braid"](braid_request(0.5 * CLAIMED_BRAID_SECONDS))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "iteration_seconds": run.objective_seconds, "gpus": run.num_gpus, "notes": list(run.notes)}


def main() -> None:
    """Measure and print; also print whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--repeats", type=int, default=3, help="take the best of so many runs")
    parser.add_argument("--skip-braid", action="store_true", help="leave 3,072 GPUs out")
    parser.add_argument("--skip-exhaustive", action="store_true", help="leave exhaustive searches out (minutes)")
    parser.add_argument("--planners", nargs="*", metavar="NAME", help="only time planners for 10,240 GPUs; by default all")
    arguments = parser.parse_args()
    if arguments.planners is not None:
        with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
            planned = pool.map(measure_planner, arguments.planners or [*COMPARED, *TEMPLATE_PLANNERS], chunksize=1)
        seconds, most_mb = sum(row["seconds"] for row in planned), max(row["peak_mb"] for row in planned)
        holds = seconds <= CLAIMED_SECONDS_OF_ALL and most_mb <= CLAIMED_MB
        print(json.dumps({"planners": planned, "seconds": seconds, "holds": holds}, indent=None if arguments.json else 2))
        return
    rows = []
    for num_gpus, published in PUBLISHED_MS.items():
        request = disttrain_request(num_gpus)
        problem = build_problem(request)
        found = rank_allocations(problem, slack=1.0)[0]
        row: dict[str, Any] = {"gpus": num_gpus, "ms": processor_ms(request, arguments.repeats), "published_ms": published}
        row |= {"objective_seconds": found.seconds}
        if not arguments.skip_exhaustive:
            row["exhaustive_seconds"] = exhaustive_seconds(problem, is_thinned=num_gpus > 112)
            row["is_equal"] = abs(row["exhaustive_seconds"] - found.seconds) <= 1e-9 * found.seconds
        rows.append(row)
    result: dict[str, Any] = {"disttrain": rows, "solvers": compare_solvers()}
    if not arguments.skip_braid:
        result["braid"] = measure_braid()
    result["holds"] = all(row["ms"] <= CLAIMED_MS and row.get("is_equal", True) for row in rows) and (
        arguments.skip_braid or result["braid"]["seconds"] <= CLAIMED_BRAID_SECONDS
    )
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    console = Console(width=130)
    columns = list(dict.fromkeys(key for row in result["disttrain"] for key in row))
    table = Table(*columns)
    for row in result["disttrain"]:
        table.add_row(*(f"{row[key]:.4f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    console.print(table)
    console.print(
        "closed form {closed_form_us:.1f} us, general solver {general_solver_us:.0f} us, largest relative difference "
        "{largest_relative_difference:.1e}".format(**result["solvers"])
    )
    if "braid" in result:
        console.print("braid, 3,072 GPUs: {seconds:.1f} s for a step of {iteration_seconds:.4g} s".format(**result["braid"]))
        for note in result["braid"]["notes"]:
            console.print(note)
    console.print(f"claims hold: {result['holds']}")


if __name__ == "__main__":
    main()
