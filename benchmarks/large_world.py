"""Claim: at 3,072 ranks a rank has at most 16 communicators, and planning a step costs its training process under 10 ms.

One process takes the place of one rank after another (torch's `fake` backend, which connects to nobody): GPT-175B on tp 8 x
pp 8 x dp 40, ViT-22B on tp 8 x dp 64. Measured are

- communicators: of the busiest rank, process groups and tracks of messages, each one of NCCL's;
- groups: seconds until all process groups of the run are made, and messages have their partners (without NCCL's own work);
- hand-over: seconds of the processor until the training process has a step that its loader's process decided, ranks have
  compared digests, and the rank's lane and routes and the totals of the global batch are read: all it does for planning. Steps
  are those of `--schedule` and `--balance`, with 64 samples per replica of the LLM, of 1 to 4 images each; the median of
  `--repeats` after the first.

`--before CHECKOUT` runs this file on another checkout of Braid (with its kernels built) as well; not on one without
`Schedule.entries`, which the executor reads.

Run `python benchmarks/large_world.py [--json] [--repeats N] [--schedule NAME] [--balance NAME] [--before CHECKOUT]`.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.environ.get("BRAID_CHECKOUT", str(Path(__file__).parents[1])))

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from megatron.runtime.communication import units as unit_groups
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.emulation.emulated_stage import with_emulated_inputs
from megatron.runtime.feed.agreement import assignment_digest, check_agreement
from megatron.runtime.launch.failure import StopReason
from megatron.runtime.step.step import Step
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.placement import drop_idle_samples
from multimodal.plan.communicators import max_communicators_per_rank, message_partners
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, LengthBatch, SampleLengths

MODEL = Path(__file__).parents[1] / "examples" / "models" / "vit-22b-gpt-175b.yaml"
SIZES = {
    "vision": UnitSizes(tensor_parallel_size=8, data_parallel_size=64),
    "llm": UnitSizes(tensor_parallel_size=8, pipeline_parallel_size=8, data_parallel_size=40),
}
NUM_RANKS, SAMPLES_PER_REPLICA, TIMEOUT = 3072, 64, timedelta(minutes=10)
RANKS = {"encoder": 0, "LLM, first stage": 512, "LLM, last stage": 3071}
MOST_COMMUNICATORS, MOST_SECONDS = 16, 0.010


def draw_lengths(seed: int) -> list[SampleLengths]:
    """Draw a global batch of very unequal samples."""
    generator = np.random.default_rng(seed)
    samples = []
    for index in range(SIZES["llm"].data_parallel_size * SAMPLES_PER_REPLICA):
        tokens = np.minimum(64 + generator.lognormal(5.0, 1.0, generator.integers(1, 5)), 4096).astype(int).tolist()
        text = int(min(32 + generator.lognormal(5.5, 1.0), 8192))
        samples.append(SampleLengths(index, tuple(ItemLengths("vision", 4 * each, each) for each in tokens), text, text // 2))
    return samples


def measure_groups(graph: ModelGraph, plan: Plan, *, rank: int) -> float:
    """Make the groups, and find the partners of a rank; returns seconds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    start = time.perf_counter()
    book = unit_groups.GroupBook(rank=rank, timeout=TIMEOUT)
    unit_groups.build_memberships(graph, plan, book=book)
    partners = message_partners(graph, plan, rank=rank)
    MessageChannel(tracks=partners, timeout=TIMEOUT).connect(partners, device=torch.device("cpu"))
    return time.perf_counter() - start


class OneStep(Dataset[Any]):
    """A step that a loader's process hands over again and again."""

    def __init__(self, step: Any, count: int) -> None:
        self._step, self._count = step, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return self._step.packed() if hasattr(self._step, "packed") else self._step


def measure_hand_over(step: Any, *, repeats: int) -> float:
    """Take a step from a loader's process `repeats` times; returns the median seconds of this process."""
    seconds = []
    steps = iter(DataLoader(OneStep(step, repeats + 1), batch_size=None, num_workers=1, prefetch_factor=2))
    for number in range(repeats + 1):
        time.sleep(1.0)  # gives the loader time to be ahead
        gc.collect()
        start = time.process_time()
        taken = next(steps)
        check_agreement(taken, number=number, wait_seconds=0.0, stop=StopReason.NONE, device=torch.device("cpu"))
        _ = taken.num_tokens, taken.num_target_tokens, taken.num_generated_values, len(taken.lengths)
        _ = taken.schedule.entries(taken.plan.lane_of_rank[dist.get_rank()])
        for place in step.inputs:
            _ = taken.subsets(place)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def decide(graph: ModelGraph, plan: Plan, *, schedule: str, balance: str) -> tuple[Any, Any, list[SampleLengths]]:
    """Return the schedule of the second step, its assignment and its lengths, as a loader decides it."""
    cache = ScheduleCache(graph, plan, BUILDERS[schedule], ())
    for seed in range(2):
        lengths = [replace(sample, sample_id=number) for number, sample in enumerate(draw_lengths(seed))]
        batch = LengthBatch(lengths)
        assignment = BALANCERS[balance](batch, graph=graph, plan=plan, options=BalanceOptions())
        assignment = drop_idle_samples(assignment, graph=graph, lengths=batch)
        found = cache.schedule(assignment)
    return found, assignment, lengths


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure this checkout."""
    graph = ModelGraph.from_file(MODEL)
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=NUM_RANKS)
    schedule, assignment, lengths = decide(graph, plan, schedule=arguments.schedule, balance=arguments.balance)
    rows = {}
    for name, rank in RANKS.items():
        schedule.entries(schedule.shape.plan.lane_of_rank[rank])
        digest = assignment_digest(assignment)
        by_id = {sample.sample_id: sample for sample in lengths}
        step = Step(schedule=schedule, assignment=assignment, lengths=by_id, inputs={}, digest=digest)
        groups_seconds = measure_groups(graph, plan, rank=rank)
        taken = measure_hand_over(with_emulated_inputs(step, rank=rank), repeats=arguments.repeats)
        rows[name] = {"groups_seconds": groups_seconds, "hand_over_seconds": taken}
        dist.destroy_process_group()
    return {"max_communicators_per_rank": max_communicators_per_rank(graph, plan), "ranks": rows}


def measure_elsewhere(root: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this file on another checkout."""
    given = ["--repeats", str(arguments.repeats), "--schedule", arguments.schedule, "--balance", arguments.balance]
    environment = os.environ | {"BRAID_CHECKOUT": root, "PYTHONPATH": root}
    run = subprocess.run([sys.executable, __file__, *given, "--json"], stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, Any] = json.loads(run.stdout)["now"]
    return found


def show(found: dict[str, Any], *, title: str) -> None:
    """Print a table of one checkout."""
    table = Table("rank", "groups (s)", "hand-over (ms)")
    table.title = f"{title}: at most {found['max_communicators_per_rank']} communicators of a rank"
    for name, row in found["ranks"].items():
        table.add_row(name, f"{row['groups_seconds']:.2f}", f"{1e3 * row['hand_over_seconds']:.2f}")
    Console().print(table)


def main() -> None:
    """Measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="hand-overs of which the median counts")
    parser.add_argument("--schedule", default="1f1b", choices=list(BUILDERS))
    parser.add_argument("--balance", default="orchmllm", choices=list(BALANCERS))
    parser.add_argument("--before", metavar="CHECKOUT", help="another checkout to compare with")
    arguments = parser.parse_args()
    now = measure(arguments)
    before = measure_elsewhere(arguments.before, arguments) if arguments.before else None
    most_seconds = max(row["hand_over_seconds"] for row in now["ranks"].values())
    holds = now["max_communicators_per_rank"] <= MOST_COMMUNICATORS and most_seconds < MOST_SECONDS
    if arguments.json:
        print(json.dumps({"now": now, "before": before, "load": os.getloadavg()[0], "holds": holds}))
        return
    if before is not None:
        show(before, title="before")
    show(now, title="now")
    print("the claim holds" if holds else "the claim does not hold")


if __name__ == "__main__":
    main()
