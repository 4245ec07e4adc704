"""Claim: a step takes as long as its plan was predicted to take, and plans rank as predicted.

The benchmark does what a person with this machine and the digits model (examples/digits) would do: `tools/profile_layers.py`
times its layers, `tools/plan.py` plans for two ranks with three planners, `pretrain_mllm.py` trains by each plan on two
processes. Then three plans for six ranks run in `tools/emulate.py`, in six processes with timed waits as computations, for a
machine that is slower by `SLOWDOWN`, as six ranks share the cores here. Before both, three microbatch sizes run on a single rank,
in processor time, which other programs disturb least. Printed are predicted and measured seconds of a step and both rankings.

Plans take turns, --rounds times. If other programs use the machine, only the steps count during which they took least of it, and
their share is printed, too: no prediction knows it. Samples are loaded between steps, by the ranks themselves, since loader
processes would need cores of their own.

Run `python benchmarks/predicted_step.py [--layer-costs COSTS.yaml] [--only alone|real|emulated] [--steps N] [--rounds N]`.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from examples.digits.handwritten_digits import DigitsSource
from multimodal.cost.seconds.layer_curves import Interpolated, LayerCurves
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ModelGraph

ROOT = Path(__file__).resolve().parents[1]
MODEL, CLUSTER = ROOT / "examples" / "digits" / "model.yaml", ROOT / "examples" / "clusters" / "cpu.yaml"
VOCAB_SIZE, SEQ_LENGTH, SEED = 384, 128, 1234
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 32, 8
PROFILE = ("--sizes", "64,128,256,512", "--sequences", "1,4,16")
NUM_SAMPLES = 3200
WARM_UP = 10
"""Steps at the start that do not count: connections, caches, the loader's first batches."""
WINDOW = 5
"""Consecutive steps over which the processor time of other programs is measured."""
QUIET = 0.1
"""Share of the cores that other programs may take in a window that counts; at least the quietest tenth of windows counts."""
SLOWDOWN = 10.0
REAL = {
    "units on all ranks": ("--planner", "braid"),
    "a pipeline of all layers": ("--planner", "megatron-balanced", "--fix", "llm:pp=2"),
    "ranks of their own": ("--planner", "disttrain"),
}
ALONE = {
    "8 samples at once": ("--planner", "braid", "--micro-batch-size", "8"),
    "4 samples at once": ("--planner", "braid", "--micro-batch-size", "4"),
    "1 sample at once": ("--planner", "braid", "--micro-batch-size", "1"),
}
EMULATED = {
    "units on all ranks": ("--planner", "braid"),
    "a pipeline of all layers": ("--planner", "megatron-balanced", "--fix", "llm:pp=3"),
    "ranks of their own": ("--planner", "cornstarch"),
}


class Planned(NamedTuple):
    """A plan file and the answer of tools/plan.py."""

    path: Path
    answer: Mapping[str, Any]

    @property
    def flags(self) -> list[str]:
        """Return the flags that run the plan as it was predicted."""
        answer = self.answer
        passes = ("--schedule-passes", ",".join(answer["schedule_passes"])) if answer["schedule_passes"] else ()
        sizes = ("--micro-batch-size", str(answer["micro_batch_size"]))
        return ["--schedule", answer["schedule"], *passes, "--balance", answer["balance"], *sizes]


class Window(NamedTuple):
    """Some consecutive steps."""

    seconds: tuple[float, ...]
    """Seconds of each step."""
    others: float
    """Share of the machine's cores that other programs took during the steps."""


def write_lengths(path: Path) -> None:
    """Write the lengths of the samples that training reads first."""
    image = ModelGraph.from_file(MODEL).unit("vision").image
    assert image is not None
    source = DigitsSource(
        NUM_SAMPLES, seed=SEED, split="train", unit="vision", image=image, tokenizer=ByteTokenizer(), seq_length=SEQ_LENGTH
    )
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("image_sizes", "text_tokens", "answer_words", "text_words"))
        for index in range(NUM_SAMPLES):
            lengths = source.lengths(index)
            grids = [source.item_grid(index, item) for item in range(len(lengths.items))]
            sizes = ";".join(f"{columns * image.patch_size}x{height * image.patch_size}" for height, columns in grids)
            rows.writerow((sizes, lengths.num_text_tokens, lengths.num_target_tokens, lengths.num_text_tokens))


def call(*command: str | Path) -> str:
    """Run a program of this repository and return its output; raises RuntimeError with the output if it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def profile(folder: Path) -> Path:
    """Time the model's layers; returns the costs file."""
    costs = folder / "costs.yaml"
    what = ("--model", MODEL, "--vocab-size", str(VOCAB_SIZE), "--output", costs)
    call(ROOT / "tools" / "profile_layers.py", *what, *PROFILE)
    return costs


def plan(name: str, how: Sequence[str], *, num_ranks: int, folder: Path, costs: Path) -> Planned:
    """Plan for `num_ranks` ranks."""
    path = folder / f"{name.replace(' ', '-')}-{num_ranks}.yaml"
    what = ("--model", MODEL, "--cluster", CLUSTER, "--layer-costs", costs, "--lengths", folder / "lengths.csv")
    sizes = ("--num-gpus", num_ranks, "--global-batch-size", GLOBAL_BATCH_SIZE, "--micro-batch-size", MICRO_BATCH_SIZE, *how)
    more = ("--vocab-size", VOCAB_SIZE, "--num-iterations", 8, "--time-budget", 10, "--output", path, "--json")
    return Planned(path, json.loads(call(ROOT / "tools" / "plan.py", *map(str, (*what, *sizes, *more)))))


def training(planned: Planned, log: Path, *, num_steps: int) -> list[str]:
    """Return the program and flags that train by a plan."""
    log.unlink(missing_ok=True)
    data = ("--data-path", "digits", "--program-samples", "41600", "--seq-length", SEQ_LENGTH)
    learning = ("--train-iters", num_steps, "--lr", "2e-3", "--adam-beta2", "0.99", "--clip-grad", "1.0", "--seed", SEED)
    more = ("--global-batch-size", GLOBAL_BATCH_SIZE, "--num-workers", 0, "--log-json", log)
    flags = (ROOT / "pretrain_mllm.py", "--model", MODEL, "--plan", planned.path, *planned.flags, *data, *learning, *more)
    return list(map(str, flags))


def train_alone(planned: Planned, *, folder: Path, num_steps: int) -> list[float]:
    """Train by a plan for one rank; returns the seconds of its steps in this rank's processor time."""
    log = folder / "log.jsonl"
    own_time = "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = sys.argv[1:]"
    call("-c", f"{own_time}; runpy.run_path(sys.argv[0], run_name='__main__')", *training(planned, log, num_steps=num_steps))
    return [json.loads(line)["step_seconds"] for line in log.read_text().splitlines()][WARM_UP:]


def train(planned: Planned, *, folder: Path, num_steps: int) -> list[Window]:
    """Train by a plan on two processes."""
    log = folder / "log.jsonl"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29641")
    command = [*launcher, *training(planned, log, num_steps=num_steps)]
    times: list[float] = []
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        others: list[float] = []
        while process.poll() is None:
            for _ in range(len(times), _num_lines(log)):
                times.append(time.perf_counter())
                others.append(_others())
            time.sleep(0.002)
    if process.returncode:
        raise RuntimeError(f"training ended with {process.returncode}:\n{(folder / 'output.txt').read_text()}")
    seconds = [json.loads(line)["step_seconds"] for line in log.read_text().splitlines()]
    return [
        Window(
            tuple(seconds[last - WINDOW + 1 : last + 1]),
            max(0.0, others[last] - others[last - WINDOW]) / (times[last] - times[last - WINDOW]) / (os.cpu_count() or 1),
        )
        for last in range(WARM_UP + WINDOW, len(times), WINDOW)
    ]


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _others() -> float:
    """Return the processor seconds so far of all programs except this one and those that it started."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    parents, own = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may have ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], own[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_own(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_own(parents[process]))

    return (user + nice + system - sum(ticks for process, ticks in own.items() if is_own(process))) / os.sysconf("SC_CLK_TCK")


def quietest(windows: Sequence[Window]) -> Window:
    """Join the windows that count."""
    ordered = sorted(windows, key=lambda window: window.others)
    kept = [window for window in ordered if window.others < QUIET] or ordered[: -(-len(ordered) // 10)]
    return Window(
        tuple(seconds for window in kept for seconds in window.seconds), statistics.fmean(window.others for window in kept)
    )


def compare_alone(folder: Path, costs: Path, *, num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Predict and train on one rank, schedule by schedule."""
    plans = {name: plan(name, how, num_ranks=1, folder=folder, costs=costs) for name, how in ALONE.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(num_rounds):
        for name, planned in plans.items():
            seconds[name] += train_alone(planned, folder=folder, num_steps=num_steps)
    return [
        _row(name, planned, planned.answer["iteration_seconds"], statistics.median(seconds[name]))
        for name, planned in plans.items()
    ]


def compare_real(folder: Path, costs: Path, *, num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Predict and train, plan by plan."""
    plans = {name: plan(name, how, num_ranks=2, folder=folder, costs=costs) for name, how in REAL.items()}
    windows: dict[str, list[Window]] = {name: [] for name in plans}
    for _ in range(num_rounds):
        for name, planned in plans.items():
            windows[name] += train(planned, folder=folder, num_steps=num_steps)
    rows = []
    for name, planned in plans.items():
        seconds, others = quietest(windows[name])
        predicted, measured = planned.answer["iteration_seconds"], statistics.median(seconds)
        rows.append(_row(name, planned, predicted, measured, others=others, num_steps=len(seconds)))
    return rows


def compare_emulated(folder: Path, costs: Path) -> list[dict[str, Any]]:
    """Predict and emulate, plan by plan."""
    plans = {name: plan(name, how, num_ranks=6, folder=folder, costs=costs) for name, how in EMULATED.items()}
    slow = folder / "slow.yaml"
    slower(LayerProfile.from_file(costs), SLOWDOWN).to_file(slow)
    rows = []
    for name, planned in plans.items():
        answer = json.loads(
            call(
                *(ROOT / "tools" / "emulate.py", "--model", MODEL, "--cluster", CLUSTER, "--plan", planned.path),
                *("--lengths", folder / "lengths.csv", "--layer-costs", slow, "--vocab-size", str(VOCAB_SIZE), *planned.flags),
                *("--global-batch-size", str(GLOBAL_BATCH_SIZE), "--json"),
            )
        )
        rows.append(_row(name, planned, answer["simulated_seconds"], answer["measured_seconds"]))
    return rows


def slower(profile: LayerProfile, factor: float) -> LayerProfile:
    """Return the layers with each computation `factor` times as long; the real runtime adds the rest of a step."""

    def slow(curve: Any) -> Any:
        return curve.shared(factor) if isinstance(curve, Interpolated) else curve.times(factor)

    return replace(profile, curves={key: LayerCurves(*map(slow, curves)) for key, curves in profile.curves.items()}, step=None)


def _row(name: str, planned: Planned, predicted: float, measured: float, **more: float) -> dict[str, Any]:
    answer = planned.answer
    return {
        "plan": name,
        "planner": answer["planner"],
        "schedule": answer["schedule"],
        "planned_seconds": answer["iteration_seconds"],
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "ratio": measured / predicted,
        **more,
    }


def ranking(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return the names of the plans, the fastest first."""
    return [row["plan"] for row in sorted(rows, key=lambda row: row[key])]


def main(argv: Sequence[str]) -> int:
    """Profile, plan, run and print; returns 1 if the rankings differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer-costs", type=Path, metavar="COSTS.yaml", help="profiled before (profile now)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each training run (60)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="training runs of each plan (3)")
    parser.add_argument("--only", choices=("alone", "real", "emulated"), help="one comparison (all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    given = parser.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lengths(folder / "lengths.csv")
        costs = profile(folder) if given.layer_costs is None else given.layer_costs.resolve()
        if given.only in (None, "alone"):
            found["alone"] = compare_alone(folder, costs, num_steps=given.steps, num_rounds=given.rounds)
        if given.only in (None, "real"):
            found["real"] = compare_real(folder, costs, num_steps=given.steps, num_rounds=given.rounds)
        if given.only in (None, "emulated"):
            found["emulated"] = compare_emulated(folder, costs)
    agrees = {kind: ranking(rows, "planned_seconds") == ranking(rows, "measured_seconds") for kind, rows in found.items()}
    if given.json:
        print(json.dumps({**found, "ranks_as_predicted": agrees}))
    else:
        for kind, rows in found.items():
            print_table(kind, rows, agrees=agrees[kind])
    return 0 if all(agrees.values()) else 1


def print_table(kind: str, rows: Sequence[Mapping[str, Any]], *, agrees: bool) -> None:
    """Print a row per plan, and both rankings."""
    console = Console(width=130, highlight=False)
    titles = {"alone": "1 rank, processor time", "real": "2 ranks", "emulated": f"6 ranks, emulated {SLOWDOWN:g} times as slow"}
    columns = ("plan", "planner", "schedule", "predicted ms", "measured ms", "ratio", "steps", "others took")
    table = Table(*columns, title=titles[kind], box=None)
    for row in rows:
        seconds = (f"{1e3 * row[key]:.1f}" for key in ("predicted_seconds", "measured_seconds"))
        quiet = (str(row["num_steps"]), f"{row['others']:.0%}") if "others" in row else ("-", "-")
        table.add_row(row["plan"], row["planner"], row["schedule"], *seconds, f"{row['ratio']:.2f}", *quiet)
    console.print(table)
    console.print(f"predicted: {' < '.join(ranking(rows, 'planned_seconds'))}")
    console.print(f"measured:  {' < '.join(ranking(rows, 'measured_seconds'))}{'' if agrees else '  (differs)'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
