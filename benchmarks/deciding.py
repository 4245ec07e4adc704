"""Claim: on one core, a step of 3,072 LLM ranks is decided in 250 ms by every balancer for every schedule (`auto`: 500 ms).

Schedules by durations, which are ordered anew for every step, take 1 s. With the others, a step of 12,288 ranks is decided in
1 s; `zb-v` takes a little longer with the default passes (docs/balance.md). Every rank decides every step
by itself, ahead of training: from the lengths of the global batch to its own part of assignment and schedule. The parts, in the
order of `StepPlanner`:

- lengths: collecting the lengths of the global batch from those of the samples;
- balance: the balancer; report: the evenness of its assignment and of the data's order, and the model's FLOPs;
- assignment: validating it, dropping idle samples, and computing its digest;
- first: the schedule of the run's first step, validated; next: the schedule of a step with other samples; again: the schedule of
  a step with the same counts of microbatches and the same routes;
- own: this rank's lane and inputs (only their sizes, as in emulation; nothing is loaded).

A step takes the sum of all but `first` and `again`. The LLM (GPT-175B) runs on tp 8 x pp 8 x dp ranks / 64, its encoder (ViT-22B)
on as many replicas of 8 ranks of their own; 64 samples per LLM replica have 1 to 4 images each. `--kernels` times balancers
beside the post-balancing kernel alone, without schedule, at 2,560 replicas of 60 samples with images and audio.

Seconds are processor time, for each part the least in `--repeats` steps after the first, since others may use the machine.
`--before CHECKOUT` runs this file on another checkout of Braid (with its kernels built) as well, and shows the ratios.

Run `python benchmarks/deciding.py [--json] [--repeats N] [--ranks 64 512 3072 12288] [--balancers ...] [--schedules ...]`.
"""

import argparse
import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, os.environ.get("BRAID_CHECKOUT", str(Path(__file__).parents[1])))

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron.runtime.emulation.emulated_stage import with_emulated_inputs
from megatron.runtime.feed.agreement import assignment_digest
from megatron.runtime.step.balance_report import imbalances
from megatron.runtime.step.step import Step
from multimodal.balance import BALANCERS
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.in_order import balance_in_order
from multimodal.balance.placement import drop_idle_samples
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.cost.flops import step_flops
from multimodal.cost.step_costs import StepCosts
from multimodal.plan.plans_of_sizes import UnitSizes, fold_stages, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.schedule import Schedule
from multimodal.values.validate import validate_assignment

try:
    from multimodal.values.sample_lengths import LengthBatch
except ImportError:  # an older checkout without such batches
    LengthBatch = tuple  # type: ignore[assignment, misc]
try:
    from megatron.runtime.platform import keep_freed_memory
except ImportError:  # an older checkout, whose workers do not

    def keep_freed_memory() -> None:
        """Change nothing."""


Result = TypeVar("Result")
EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS_PER_REPLICA, SAMPLES_PER_REPLICA = 64, 64
CLAIMED_SECONDS = {3072: 0.25, 12288: 1.0}
CLAIMED_SECONDS_BY_DURATIONS = {3072: 1.0}
CLAIMED_AUTO_SECONDS = 0.5
PARTS = ("lengths", "balance", "report", "assignment", "first", "next", "again", "own")
NOT_IN_A_STEP = ("first", "again")
BY_DURATIONS = ("optimus", "optimus-zb", "interleaved-zb")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "dip", "dip-4", "breadth-first", "interleaved-1f1b", "zb-v", *BY_DURATIONS)
"""Schedules that a run with one encoder can have."""
PLANNED = [name for name, row in PASSES.items() if row.is_planned]
"""The passes that runs on CUDA have by default."""
_CHUNKS = dict.fromkeys(("breadth-first", "interleaved-1f1b", "zb-v", *BY_DURATIONS), 2)


def draw_batch(num_samples: int, *, seed: int, units: Sequence[str]) -> list[SampleLengths]:
    """Draw samples of 1 to 4 items of each unit, of very unequal lengths."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        items = [
            ItemLengths(unit, 4 * length, length)
            for unit in units
            for length in np.minimum(64 + generator.lognormal(5.0, 1.0, generator.integers(1, 5)), 4096).astype(int).tolist()
        ]
        text = int(min(32 + generator.lognormal(5.5, 1.0), 8192))
        samples.append(SampleLengths(0, tuple(items), text, text // 2))
    return samples


class Clock:
    """Measures the seconds of each part of one decision."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], Result]) -> Result:
        """Do the work of a part and record its seconds."""
        gc.collect()
        start = time.process_time()
        result = work()
        self.seconds[part] = time.process_time() - start
        return result


def decide(
    graph: ModelGraph, plan: Plan, *, balancer: str, schedule: str, passes: Sequence[str], repeats: int
) -> dict[str, float]:
    """Time the parts of deciding steps after a run's first one; returns the least seconds of each part."""
    num_samples = plan.units[graph.backbone.name].data_parallel_size * SAMPLES_PER_REPLICA
    units = [unit.name for unit in graph.encoders]
    cluster = Cluster.from_file(EXAMPLES / "clusters" / "h100.yaml")
    schedules = ScheduleCache(graph, plan, BUILDERS[schedule], [PASSES[name] for name in passes])
    predictor = StepPredictor(schedules, cluster, graph.backbone.vocab_size or 51200)
    options = BalanceOptions(predictor=predictor if BALANCERS[balancer].needs_costs else None)
    balance = {"graph": graph, "plan": plan, "options": options}
    rank = plan.units[graph.backbone.name].ranks[0]
    first, steps = Clock(), []
    for number in range(1 + repeats):
        drawn, clock = draw_batch(num_samples, seed=number, units=units), Clock()
        ids = range(number * num_samples, (number + 1) * num_samples)
        lengths = clock.time("lengths", lambda drawn=drawn, ids=ids: _lengths(drawn, ids))
        assignment = clock.time("balance", lambda lengths=lengths: BALANCERS[balancer](lengths, **balance))
        clock.time("report", partial(_report, assignment, lengths, **balance))
        assignment, digest = clock.time("assignment", partial(_check, assignment, lengths, graph=graph, plan=plan))
        costs = partial(predictor.costs, lengths=lengths)
        if number == 0:
            first.time("first", lambda given=assignment, costs=costs: _schedule(schedules, given, costs))
            continue
        built = clock.time("next", lambda given=assignment, costs=costs: _schedule(schedules, given, costs))
        same, _ = _check(BALANCERS[balancer](lengths, **balance), lengths, graph=graph, plan=plan)
        clock.time("again", lambda given=same, costs=costs: _schedule(schedules, given, costs))
        clock.time(
            "own",
            lambda built=built, assignment=assignment, lengths=lengths, digest=digest: _own_part(
                built, assignment, lengths, digest, rank
            ),
        )
        steps.append(clock.seconds)
    least = {part: min(seconds[part] for seconds in steps) for part in steps[0]} | first.seconds
    step = sum(least[part] for part in PARTS if part not in NOT_IN_A_STEP)
    return {part: least[part] for part in PARTS} | {
        "step": step,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def _lengths(drawn: Sequence[SampleLengths], ids: range) -> Sequence[SampleLengths]:
    return LengthBatch(replace(sample, sample_id=sample_id) for sample, sample_id in zip(drawn, ids, strict=True))


def _report(
    assignment: Assignment, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions
) -> None:
    work = BatchWork(graph, lengths, options)
    for each in (balance_in_order(work, plan=plan), assignment):
        imbalances(each, work)
    step_flops(graph, lengths, vocab_size=51200)


def _check(assignment: Assignment, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan) -> tuple[Assignment, int]:
    validate_assignment(assignment, lengths, graph=graph, plan=plan)
    assignment = drop_idle_samples(assignment, graph=graph, lengths=lengths)
    return assignment, assignment_digest(assignment)


def _schedule(schedules: ScheduleCache, assignment: Assignment, costs_of: Callable[[Assignment], StepCosts]) -> Schedule:
    costs = costs_of(assignment)
    return schedules.find(schedules.shape(assignment), costs).to_run(costs)


def _own_part(schedule: Any, assignment: Any, lengths: Sequence[SampleLengths], digest: int, rank: int) -> None:
    schedule.entries(schedule.shape.plan.lane_of_rank[rank])
    by_id = {sample.sample_id: sample for sample in lengths}
    step = Step(schedule=schedule, assignment=assignment, lengths=by_id, inputs={}, digest=digest)
    with_emulated_inputs(step, rank=rank)


def build_case(num_ranks: int, *, schedule: str) -> tuple[ModelGraph, Plan]:
    """Return ViT-22B and GPT-175B, each on ranks of its own."""
    graph = ModelGraph.from_file(EXAMPLES / "models" / "vit-22b-gpt-175b.yaml")
    num_replicas = num_ranks // RANKS_PER_REPLICA
    sizes = {
        "vision": UnitSizes(tensor_parallel_size=8, data_parallel_size=num_replicas),
        "llm": UnitSizes(
            tensor_parallel_size=8,
            pipeline_parallel_size=8,
            virtual_pipeline_size=_CHUNKS.get(schedule, 1),
            data_parallel_size=num_replicas,
        ),
    }
    plan = plan_disaggregated(graph, sizes=sizes, world_size=num_replicas * 72)
    return graph, fold_stages(plan) if schedule == "zb-v" else plan


def measure_kernels(balancers: Sequence[str], *, num_replicas: int, num_samples: int, repeats: int) -> dict[str, float]:
    """Time balancers alone, for a model with images and audio, and the post-balancing kernel on as many lengths.

    Returns the least of several times: the first call in a process touches its working memory for the first time.
    """
    graph = ModelGraph.from_file(EXAMPLES / "models" / "cornstarch-valm-m.yaml")
    names = [unit.name for unit in graph.encoders]
    sizes = {name: UnitSizes(data_parallel_size=num_replicas) for name in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=num_replicas * len(sizes))
    lengths = _lengths(draw_batch(num_replicas * num_samples, seed=0, units=names), range(num_replicas * num_samples))
    tokens = np.array([sample.num_tokens for sample in lengths])
    clocks = [Clock() for _ in range(repeats)]
    for clock in clocks:
        clock.time("kernel, once per unit", lambda: [post_balance(tokens, num_bins=num_replicas) for _ in graph.unit_names])
        for name in balancers:
            clock.time(name, lambda name=name: BALANCERS[name](lengths, graph=graph, plan=plan, options=BalanceOptions()))
    return {part: min(clock.seconds[part] for clock in clocks) for part in clocks[0].seconds}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return case -> part -> seconds; every case has a process of its own, whose memory is the case's."""
    measured = {}
    processes = multiprocessing.get_context("fork")
    for num_ranks in arguments.ranks:
        for schedule in arguments.schedules:
            graph, plan = build_case(num_ranks, schedule=schedule)
            for balancer in arguments.balancers:
                case = f"{num_ranks} {balancer} {schedule}"
                given = {"balancer": balancer, "schedule": schedule, "passes": arguments.passes, "repeats": arguments.repeats}
                with processes.Pool(1, keep_freed_memory) as pool:  # as a run's worker that decides
                    measured[case] = pool.apply(decide, (graph, plan), given)
    if arguments.kernels:
        measured["2560 x 60"] = measure_kernels(
            [name for name in arguments.balancers if name != "auto"], num_replicas=2560, num_samples=60, repeats=arguments.repeats
        )
    return measured


def measure_elsewhere(root: str) -> dict[str, dict[str, float]]:
    """Run this file on another checkout, and return its seconds."""
    given = [each for index, each in enumerate(sys.argv[1:], 1) if "--before" not in (each, sys.argv[index - 1])]
    environment = os.environ | {"BRAID_CHECKOUT": root, "PYTHONPATH": root}
    run = subprocess.run([sys.executable, __file__, *given, "--json"], stdout=subprocess.PIPE, check=True, env=environment)
    seconds: dict[str, dict[str, float]] = json.loads(run.stdout)["seconds"]
    return seconds


def show(measured: dict[str, dict[str, float]], before: dict[str, dict[str, float]], console: Console) -> None:
    """Print milliseconds per case and part, and the ratio to the other checkout's."""
    columns = (*PARTS, "step")
    table = Table(
        "LLM ranks, balancer, schedule", *columns, "peak MB", title="ms of a step's decision" + " (ms before)" * bool(before)
    )
    for case, seconds in measured.items():
        if "step" in seconds:
            cells = [f"{1e3 * seconds[part]:.0f}" for part in columns]
            if case in before:
                cells = [f"{cell} ({1e3 * before[case][part]:.0f})" for cell, part in zip(cells, columns, strict=True)]
                cells[-1] += f" {before[case]['step'] / seconds['step']:.0f}x"
            table.add_row(case, *cells, f"{seconds['peak_mb']:.0f}")
        else:
            for part, took in seconds.items():
                was = f" (before {1e3 * before[case][part]:.0f})" if case in before else ""
                console.print(f"{case}: {part} {1e3 * took:.0f} ms{was}")
    if table.row_count:
        console.print(table)


def limit_of(case: str) -> float:
    """Return the seconds that the claim allows for a case's step; infinite if there is no claim about it."""
    num_ranks, balancer, schedule = case.split()
    limits = CLAIMED_SECONDS_BY_DURATIONS if schedule in BY_DURATIONS else CLAIMED_SECONDS
    claimed = limits.get(int(num_ranks), float("inf"))
    return max(claimed, CLAIMED_AUTO_SECONDS) if balancer == "auto" else claimed


def main() -> None:
    """Measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="steps of which the least counts")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 3072, 12288], help="ranks of the LLM")
    parser.add_argument("--balancers", nargs="*", default=list(BALANCERS), choices=list(BALANCERS), help="all by default")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=SCHEDULES, help="all by default")
    parser.add_argument("--passes", nargs="*", default=PLANNED, choices=list(PASSES), help="those of planned runs by default")
    parser.add_argument("--kernels", action="store_true", help="time balancers alone at 2,560 replicas as well")
    parser.add_argument("--before", metavar="CHECKOUT", help="another checkout to compare with")
    arguments = parser.parse_args()
    measured = measure(arguments)
    before = measure_elsewhere(arguments.before) if arguments.before else {}
    late = [case for case, seconds in measured.items() if "step" in seconds and seconds["step"] > limit_of(case)]
    if arguments.json:
        print(json.dumps({"seconds": measured, "before": before, "late": late, "holds": not late}))
        return
    console = Console(width=150)
    show(measured, before, console)
    console.print("the claim holds" if not late else f"the claim does not hold: {', '.join(late)}")


if __name__ == "__main__":
    main()
