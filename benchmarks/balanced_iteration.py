"""Claim: balancing what is drawn brings a step near its ideal time, and `auto` is never worse than not balancing.

A vision-language model (Qwen2.5-VL's encoder with an 8B LLM) trains with DP 4 and PP 8 on each lengths file: two encoder stages
and six LLM stages per replica. Every balancer's assignments of the same batches are simulated under the same schedule. The ideal
time is the work of all lanes, evenly spread. Without a folder of lengths, long-tailed ones are generated.

--train N instead trains the digits (examples/digits, four processes and a loader worker each) for N steps with `none` and with
`auto`, whole jobs in turn, and compares the seconds of a step, those of a job and its processor seconds. Steps before the second
measuring of layers are not counted.

Run `python benchmarks/balanced_iteration.py [--lengths DIR] [--num-batches N] [--schedule S] [--json]`,
or with `--train 200 [--rounds N]`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.beside.turns import compare, print_rows
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.data.length_table import read_length_table
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import passes_named
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, draw_length_batches

ROOT = Path(__file__).parents[1]
LENGTHS = ROOT.parent / "shared" / "data" / "lengths"
BALANCERS_SHOWN = ("none", "disttrain", "orchmllm", "entrain", "auto")
NUM_REPLICAS, GLOBAL_BATCH_SIZE, NUM_MICROBATCHES = 4, 256, 16
VOCAB_SIZE = 128256
NUM_MEASURED = 40
"""Steps of a training that are not counted."""
MODEL = {
    "vision": {
        "role": "encoder",
        "num_layers": 32,
        "hidden_size": 1280,
        "num_attention_heads": 16,
        "ffn_hidden_size": 3456,
    },
    "llm": {
        "role": "backbone",
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
    },
}
SIZES = {
    "vision": UnitSizes(data_parallel_size=NUM_REPLICAS, pipeline_parallel_size=2),
    "llm": UnitSizes(data_parallel_size=NUM_REPLICAS, pipeline_parallel_size=6),
}


def long_tailed(num_samples: int = 2000) -> tuple[SampleLengths, ...]:
    """Return samples of 0 to 6 images, with image sizes and text lengths from log-normal distributions."""
    generator = np.random.default_rng(0)
    samples = []
    for index in range(num_samples):
        outputs = np.clip(generator.lognormal(5.5, 0.9, generator.integers(0, 7)), 16, 4096).astype(int)
        text = int(np.clip(generator.lognormal(5.0, 1.0), 8, 8192))
        items = tuple(ItemLengths("vision", 4 * int(output), int(output)) for output in outputs)
        samples.append(SampleLengths(index, items, text, text))
    return tuple(samples)


def measure(samples: Sequence[SampleLengths], *, schedule: str, passes: str, num_batches: int) -> dict[str, dict[str, float]]:
    """Return balancer -> mean seconds of a step, ideal seconds, and median milliseconds of balancing a batch."""
    graph = ModelGraph.from_dict({"units": MODEL})
    plan = plan_disaggregated(graph, sizes=SIZES, world_size=8 * NUM_REPLICAS)
    cluster = Cluster.from_file(ROOT / "examples" / "clusters" / "h100.yaml")
    schedules = ScheduleCache(graph, plan, BUILDERS[schedule], passes_named(passes))
    predictor = StepPredictor(schedules, cluster, VOCAB_SIZE)
    options = BalanceOptions(num_microbatches=NUM_MICROBATCHES, vocab_size=VOCAB_SIZE, predictor=predictor)
    batches = list(draw_length_batches(samples, batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=0))
    found = {}
    for name in BALANCERS_SHOWN:
        steps, ideals, milliseconds = [], [], []
        for lengths in batches:
            start = time.process_time()
            assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
            milliseconds.append(1e3 * (time.process_time() - start))
            built = build_schedule(BUILDERS[schedule], assignment.shape(graph, plan), passes=passes_named(passes))
            costs = ModelCosts(assignment.shape(graph, plan), assignment, lengths, cluster, VOCAB_SIZE)
            simulation = simulate_schedule(built, costs)
            steps.append(simulation.iteration_seconds)
            ideals.append(simulation.ideal_seconds)
        found[name] = {
            "seconds": statistics.fmean(steps),
            "ideal_seconds": statistics.fmean(ideals),
            "milliseconds": statistics.median(milliseconds),
            "largest_over_none": max(step / none for step, none in zip(steps, found["none"]["steps"], strict=True))
            if found
            else 1.0,
            "steps": steps,  # type: ignore[dict-item]
        }
    return {name: {key: value for key, value in each.items() if key != "steps"} for name, each in found.items()}


def train(balancer: str, num_steps: int) -> dict[str, float]:
    """Train the digits; returns the median seconds of a step, and the seconds and processor seconds of the job."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        flags = ["--config", "examples/digits/config.yaml", "--balance", balancer, "--train-iters", str(num_steps)]
        flags += ["--eval-iters", "0", "--log-json", str(log)]
        command = [sys.executable, "tools/launch.py", "--nproc-per-node", "4", "pretrain_mllm.py", *flags]
        before, start = os.times(), time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.monotonic() - start, os.times()
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    used = after.children_user + after.children_system - before.children_user - before.children_system
    step = statistics.median(entry["step_seconds"] for entry in entries[NUM_MEASURED:])
    return {"step": step, "job": seconds, "processors": used}


def train_in_turn(num_steps: int, num_rounds: int) -> None:
    """Train with both, the one that begins changing from round to round, and print medians and the ratio of each round."""
    found: dict[str, list[dict[str, float]]] = {"none": [], "auto": []}
    for number in range(num_rounds):
        for name in sorted(found, reverse=number % 2 == 0):
            found[name].append(train(name, num_steps))
    for what, shown in (("step", "a step"), ("job", "the job"), ("processors", "processor seconds of the job")):
        none, auto = ([each[what] for each in found[name]] for name in ("none", "auto"))
        work = f"the digits on four ranks, a loader worker each, under `--balance auto`: {shown}"
        print_rows({work: compare(auto, none)}, peer="the same under `--balance none`")


def build_parser(description: str | None, *, num_batches: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that measures this model on every lengths file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, metavar="DIR")
    parser.add_argument("--num-batches", type=int, default=num_batches, metavar="N")
    parser.add_argument("--json", action="store_true")
    return parser


def read_lengths(folder: Path) -> Mapping[str, Sequence[SampleLengths]]:
    """Return file name -> lengths of each file of a folder, or generated lengths if there are none."""
    graph = ModelGraph.from_dict({"units": MODEL})
    files = sorted(folder.glob("*.csv.gz")) if folder.is_dir() else []
    found = {path.name.removesuffix(".csv.gz"): read_length_table(path, graph=graph) for path in files}
    return found or {"long-tailed, generated": long_tailed()}


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = build_parser(__doc__, num_batches=2)
    parser.add_argument("--schedule", choices=tuple(BUILDERS), default="eager-1f1b")
    parser.add_argument("--schedule-passes", default="", metavar="A,B")
    parser.add_argument("--train", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    given = parser.parse_args(argv)
    if given.train:
        train_in_turn(given.train, given.rounds)
        return 0
    table = {
        name: measure(samples, schedule=given.schedule, passes=given.schedule_passes, num_batches=given.num_batches)
        for name, samples in read_lengths(given.lengths).items()
    }
    print(json.dumps(table)) if given.json else print_table(table, title=given.schedule)
    return 0


def print_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]], *, title: str) -> None:
    """Print one row per lengths file."""
    console = Console(width=150, highlight=False)
    console.print(f"{title}: seconds of a step (share of the ideal), simulated; last: milliseconds that auto took for a batch")
    table = Table("lengths", *BALANCERS_SHOWN, "ideal", "auto / none", "ms", box=None)
    for name, measured in results.items():
        cells = [f"{each['seconds']:.3f} ({each['ideal_seconds'] / each['seconds']:.2f})" for each in measured.values()]
        auto, none = measured["auto"], measured["none"]
        ratio = f"{auto['seconds'] / none['seconds']:.2f} (worst {auto['largest_over_none']:.2f})"
        table.add_row(name, *cells, f"{auto['ideal_seconds']:.3f}", ratio, f"{auto['milliseconds']:.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
