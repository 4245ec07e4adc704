"""Claim: computations take as long as predicted, and so does a step, as far as processor time can tell on a busy machine.

Where other programs use the cores, a step's wall-clock time says little. So the digits model is trained on two ranks by each plan
of `benchmarks/predicted_step.py`, with every clock counting its own rank's processor time, and the seconds of every computation
are put into the plan's schedule in place of the predicted ones; messages stay as the cluster file says. That, and the measured
optimizer, is the step as it would be with cores of its own. What the runtime does between computations is not in it.

Run `python benchmarks/replayed_step.py [--layer-costs COSTS.yaml] [--steps N] [--json]`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import predicted_step as digits
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import PieceCosts
from multimodal.data.length_table import read_length_table
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.chrome_trace import read_timeline
from multimodal.schedule.passes import passes_named
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action
from multimodal.values.arrays.rows import Integers
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.timeline import Timeline
from multimodal.values.validate import read_plan
from multimodal.values.work.step_work import COMPUTE, StepWork

OWN_TIME = "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = sys.argv[1:]; "


@dataclass(frozen=True)
class MeasuredCosts(ModelCosts):
    """A step whose computations take what was measured."""

    seconds: Mapping[Action, float] | None = None

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Return the seconds that computations took."""
        assert self.seconds is not None
        found = super().of_pieces(work, pieces)
        for index in np.flatnonzero(work.resources[pieces] == COMPUTE).tolist():
            found.seconds[index], found.tensor_parallel_seconds[index] = self.seconds[work.action(int(pieces[index]))], 0.0
        return found


def train(planned: digits.Planned, *, folder: Path, num_steps: int) -> tuple[dict[int, Timeline], list[dict[str, Any]]]:
    """Train on two ranks in processor time: step (from 0) -> timeline, and the log."""
    log, program = folder / "log.jsonl", folder / "own_time.py"
    program.write_text(OWN_TIME + "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29642", str(program)]
    command += [
        *digits.training(planned, log, num_steps=num_steps),
        "--report-dir",
        str(folder / "run"),
        "--timeline-interval",
        "1",
    ]
    done = subprocess.run(command, cwd=digits.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    numbers = range(digits.WARM_UP, num_steps)
    timelines = {number: read_timeline(folder / "run" / f"timeline_step_{number + 1}.json.gz") for number in numbers}
    return timelines, [json.loads(line) for line in log.read_text().splitlines()]


def replay(planned: digits.Planned, timeline: Timeline, lengths: Sequence[SampleLengths]) -> float:
    """Seconds of the step's schedule with the computations of a timeline."""
    answer, graph, cluster = planned.answer, ModelGraph.from_file(digits.MODEL), Cluster.from_file(digits.CLUSTER)
    plan = read_plan(planned.path, graph=graph)
    options = BalanceOptions(
        micro_batch_size=answer["micro_batch_size"], ranks_per_node=cluster.gpus_per_node, vocab_size=digits.VOCAB_SIZE
    )
    assignment = BALANCERS[answer["balance"]](lengths, graph=graph, plan=plan, options=options)
    passes = passes_named(",".join(answer["schedule_passes"]))
    shape = assignment.shape(graph, plan)
    schedule = build_schedule(BUILDERS[answer["schedule"]], shape, passes=passes)
    seconds = {event.action: event.end_seconds - event.start_seconds for event in timeline.events}
    run_options = RunOptions(transformer_impl="local")
    costs = MeasuredCosts(shape, assignment, lengths, cluster, digits.VOCAB_SIZE, run_options, seconds=seconds)
    return simulate_schedule(schedule, costs).iteration_seconds


def compare(folder: Path, costs: Path, *, num_steps: int) -> list[dict[str, Any]]:
    """Predict, train and replay, plan by plan."""
    graph = ModelGraph.from_file(digits.MODEL)
    table = read_length_table(folder / "lengths.csv", graph=graph)
    samples = [replace(sample, sample_id=index) for index, sample in enumerate(table)]
    rows = []
    for name, how in digits.REAL.items():
        planned = digits.plan(name, how, num_ranks=2, folder=folder, costs=costs)
        timelines, log = train(planned, folder=folder, num_steps=num_steps)
        size = digits.GLOBAL_BATCH_SIZE
        replayed = [
            replay(planned, timeline, samples[size * number : size * (number + 1)]) + log[number]["optimizer_seconds"]
            for number, timeline in timelines.items()
        ]
        answer, seconds = planned.answer, statistics.median(replayed)
        predicted = answer["iteration_seconds"]
        found = {"plan": name, "planner": answer["planner"], "schedule": answer["schedule"], "predicted_seconds": predicted}
        rows.append({**found, "replayed_seconds": seconds, "ratio": seconds / predicted})
    return rows


def main(argv: Sequence[str]) -> int:
    """Profile, plan, train, replay and print; 1 where the rankings differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer-costs", type=Path, metavar="COSTS.yaml", help="profiled before (profile now)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of each training run (30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits.write_lengths(folder / "lengths.csv")
        costs = digits.profile(folder) if given.layer_costs is None else given.layer_costs.resolve()
        rows = compare(folder, costs, num_steps=given.steps)
    predicted, replayed = (digits.ranking(rows, key) for key in ("predicted_seconds", "replayed_seconds"))
    if given.json:
        print(json.dumps({"plans": rows, "ranks_as_predicted": predicted == replayed}))
    else:
        table = Table("plan", "planner", "schedule", "predicted ms", "replayed ms", "ratio", box=None)
        for row in rows:
            seconds = (f"{1e3 * row[key]:.1f}" for key in ("predicted_seconds", "replayed_seconds"))
            table.add_row(row["plan"], row["planner"], row["schedule"], *seconds, f"{row['ratio']:.2f}")
        console = Console(width=120, highlight=False)
        console.print(table)
        console.print(f"predicted: {' < '.join(predicted)}\nreplayed:  {' < '.join(replayed)}")
    return 0 if predicted == replayed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
