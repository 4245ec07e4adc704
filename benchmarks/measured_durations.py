"""Claim: once a run has measured its own layers, its steps take as long as predicted, within a few per cent.

Five small models train on four CPU processes, balanced by `auto`. After the first 20 steps each run goes by the layers that it
has measured so far (--measure-interval 20), and again after 40, 80, ... steps, if they differ. Every later step is simulated
twice, as it ran: on the assumed machine, by which runs go before they have measured anything, and by the layers that the run goes
by now. Shown are medians of the measured seconds and of predicted over measured ones.

Four processes on fewer cores wait for cores, which measured layers contain and the assumed machine does not; so do other
programs, whose load is printed. What changes from one 20 steps to the next is foreseen by no measurement of the first.

Run `python benchmarks/measured_durations.py [--json] [--steps N] [--only NAME ...]`.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from rich.console import Console
from rich.table import Table

from tools.launch import free_port, import_for_ranks

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS, INTERVAL = 4, 20
DEEP, WIDE = {"num_layers": 4}, {"hidden_size": 192, "ffn_hidden_size": 512}
CASES: Mapping[str, tuple[str, Mapping[str, Mapping[str, int]], tuple[str, ...]]] = {
    "encoder of two replicas, pipeline of two": ("digits", {}, ()),
    "a wide LLM in two pipelines": ("digits", {"llm": WIDE}, ("--colocate-units", "--vision-dp", "4", "--llm-dp", "2")),
    "a deep encoder in two stages": ("digits", {"vision": {**DEEP, **WIDE}}, ("--vision-dp", "1", "--vision-pp", "2")),
    "encoder and LLM on all ranks": ("digits", {"vision": WIDE}, ("--colocate-units", "--llm-pp", "1")),
    "a generator behind the LLM": ("digits_generator", {}, ()),
}
"""The trained models: an example, changes of its units, and flags."""


def flags_of(case: str, folder: Path, *, num_steps: int) -> list[str]:
    """Write a case's model, and return the flags that train it."""
    example, changes, flags = CASES[case]
    model = yaml.safe_load((ROOT / "examples" / example / "model.yaml").read_text())
    for unit, changed in changes.items():
        model["units"][unit].update(changed)
    (folder / "model.yaml").write_text(yaml.safe_dump(model, sort_keys=False))
    config = ("--config", str(ROOT / "examples" / example / "config.yaml"), "--model", str(folder / "model.yaml"))
    steps = ("--train-iters", str(num_steps), "--eval-iters", "0", "--measure-interval", str(INTERVAL), "--num-workers", "0")
    return [*config, *steps, *flags, "--balance", "auto", "--no-progress-bar"]


def train(flags: Sequence[str], rank: int, port: int, notes: Path) -> None:
    """Train on this rank; rank 0 notes of each step what it took, and what was predicted without and with measured layers."""
    import pretrain_mllm
    from megatron.runtime.training.measuring import Measuring
    from megatron.runtime.training.plan_steps import predictor_by
    from multimodal.schedule.simulate import simulate_schedule

    add = Measuring.add

    def noting(self: Measuring, number: int, step: Any, report: Any, events: Any) -> str | None:
        if rank == 0 and number > INTERVAL:
            predicted = []
            for predictor in (predictor_by(self.run, each) for each in (None, self.run.measured)):
                costs = predictor.costs(step.assignment, tuple(step.lengths.values()))
                predicted.append(simulate_schedule(step.schedule, costs).iteration_seconds + costs.update_seconds)
            with notes.open("a") as file:
                file.write(json.dumps([report.step_seconds, *predicted]) + "\n")
        return add(self, number, step, report, events)

    Measuring.add = noting  # type: ignore[method-assign]
    said = os.open(notes.with_suffix(f".{rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ.update(places, RANK=str(rank), LOCAL_RANK=str(rank))
    pretrain_mllm.main([*flags])


def measure(case: str, *, num_steps: int) -> dict[str, Any]:
    """Train a case; raises RuntimeError with what rank 0 said if a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        notes, port = Path(name) / "notes", free_port()
        flags, fork = flags_of(case, Path(name), num_steps=num_steps), multiprocessing.get_context("fork")
        ranks = [fork.Process(target=train, args=(flags, rank, port, notes)) for rank in range(NUM_RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise RuntimeError(f"{case}: {notes.with_suffix('.0').read_text()}")
        steps = [json.loads(line) for line in notes.read_text().splitlines()]
    return {
        "seconds": statistics.median(took for took, *_ in steps),
        "assumed_over_measured": statistics.median(assumed / took for took, assumed, _ in steps),
        "predicted_over_measured": statistics.median(predicted / took for took, _, predicted in steps),
        "of_intervals": [
            statistics.median(predicted / took for took, _, predicted in steps[first : first + INTERVAL])
            for first in range(0, len(steps), INTERVAL)
        ],
        "load": os.getloadavg()[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train all cases and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, metavar="N", help="of each run (80)")
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], metavar="NAME", help="cases (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    import_for_ranks()
    found = {case: measure(case, num_steps=given.steps) for case in given.only}
    if given.json:
        print(json.dumps(found))
        return 0
    table = Table("model", "step (s)", "predicted / measured: assumed machine", "measured layers", "in each 20 steps", "load")
    for case, row in found.items():
        ratios = (f"{row[key]:.3f}" for key in ("assumed_over_measured", "predicted_over_measured"))
        intervals = " ".join(f"{ratio:.2f}" for ratio in row["of_intervals"])
        table.add_row(case, f"{row['seconds']:.3f}", *ratios, intervals, f"{row['load']:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
