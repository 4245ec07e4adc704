"""Claim: the plan that `--plan auto` chooses is about as good as the best of a handful of plans that a person would try.

The digits model (examples/digits) starts on --num-ranks processes with `--plan auto`, and under plans that a person would write:
all units on all ranks, one pipeline of all ranks, ranks of their own for each unit. The plans take turns, --rounds times, so that
a machine that is slow for a while is slow for all of them; a plan's step is the median over all of its rounds, without the first
steps of each. Regret is the ratio of the chosen plan's step to the best one's.

If ranks have fewer cores than they need, or share them with other programs, computations take longer than they were profiled;
compared are measured steps.

Run `python benchmarks/orchestrator.py [--num-ranks N] [--steps N] [--rounds N] [--json]`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "digits" / "config.yaml"
CHOSEN = "chosen by --plan auto"
WARM_UP = 5
"""Steps at the start of each round that do not count."""


def plans(num_ranks: int) -> dict[str, list[str]]:
    """Return name -> flags of all plans, starting with the chosen plan."""
    half = num_ranks // 2
    found = {
        CHOSEN: ["--plan", "auto", "--plan-review-iters", "0"],
        "all units on all ranks": ["--colocate-units", "--llm-pp", "1", "--balance", "auto"],
        "the same, with microbatches of 2": ["--colocate-units", "--llm-pp", "1", "--micro-batch-size", "2"],
        "one LLM pipeline beside an encoder": ["--vision-dp", "1", "--llm-pp", str(num_ranks - 1), "--micro-batch-size", "4"],
        "ranks of their own, half and half": ["--vision-dp", str(half), "--llm-pp", "1", "--llm-dp", str(num_ranks - half)],
    }
    return {name: flags for name, flags in found.items() if num_ranks < 5 or "pipeline" not in name}


def train(flags: Sequence[str], *, num_ranks: int, num_steps: int, folder: Path) -> tuple[list[float], str]:
    """Train, and return the seconds of the steps that count, and the output; raises RuntimeError."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    how = (
        "--eval-iters",
        "0",
        "--no-progress-bar",
        "--num-workers",
        "0",
        "--train-iters",
        str(num_steps),
        "--log-json",
        str(log),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(ROOT / "pretrain_mllm.py"), "--config", str(CONFIG), *how, "--log-json", str(log), *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(flags)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    seconds = [json.loads(line)["step_seconds"] for line in log.read_text().splitlines()]
    return seconds[WARM_UP:], done.stdout + done.stderr


def main() -> None:
    """Run the plans in turns, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--num-ranks", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of a round (30)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in plans(given.num_ranks)}
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for name, flags in plans(given.num_ranks).items():
                seconds, output = train(flags, num_ranks=given.num_ranks, num_steps=given.steps, folder=Path(folder))
                taken[name] += seconds
                said = said or output
    steps = {name: median(seconds) for name, seconds in taken.items()}
    regret = steps[CHOSEN] / min(steps.values()) - 1
    why = [line for line in said.splitlines() if line.startswith(("plan", "machine:", "predicted:", "why:"))]
    if given.json:
        print(json.dumps({"num_ranks": given.num_ranks, "step_seconds": steps, "regret": regret, "said": why}))
        return
    console = Console(width=130, highlight=False)
    for line in why:
        console.print(line, markup=False)
    table = Table("plan", "step", "of best", box=None)
    for name, seconds in steps.items():
        table.add_row(name, f"{1e3 * seconds:.1f} ms", f"{seconds / min(steps.values()):.3f}")
    console.print(table)
    console.print(f"regret {regret:.1%}")


if __name__ == "__main__":
    main()
