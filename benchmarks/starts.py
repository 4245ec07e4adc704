"""Claim: every start of a run over gloo connects all of its ranks, however busy the machine is; the first step comes in 6 s.

    python benchmarks/starts.py                          200 starts beside nothing
    python benchmarks/starts.py --number 2000 --load 30  beside 30 processes that only compute
    python benchmarks/starts.py --first-step --number 5  the digits until their first step, beside a plain script of torch

A start is one of eight ranks: torch.distributed, the groups of a plan of two units, those of decoded samples and of saves in the
background, and one message over each. Ranks are processes that start again and again. Prints how many attempts of all ranks were
repeated, and how many starts failed.

With --first-step, four processes of the digits are launched by tools/launch.py, and `beside/torch_ddp.py` by torchrun, in turn.
Printed are medians of the seconds from the command to the line of the first step, and of the processor seconds of all processes
until they have ended. What Python has compiled is kept in PYTHONPYCACHEPREFIX, or a folder that a start without count fills.
"""

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # the pool of ranks is that of the tests, which are not installed

import torch
import torch.distributed as dist

from benchmarks.beside.turns import compare, print_rows
from megatron.runtime.checkpoint.checkpoint import BackgroundSave
from megatron.runtime.communication import create_groups
from megatron.runtime.communication.units import GroupBook
from megatron.runtime.feed.sample_exchange import SampleExchange
from multimodal.plan.communicators import group_ranks
from tests.distributed.rank_pool import RankError, RankPool
from tests.distributed.training_case import build_graph, build_plan

NUM_RANKS = 8
TIMEOUT = timedelta(seconds=60)
ROOT = Path(__file__).parents[1]
DIGITS = ("pretrain_mllm.py", "--config", "examples/digits/config.yaml", "--train-iters", "1", "--eval-iters", "0")
LAUNCHES = {
    "Braid": ("tools/launch.py", "--nproc-per-node", "4", *DIGITS),
    "torch": ("-m", "torch.distributed.run", "--nproc-per-node", "4", "benchmarks/beside/torch_ddp.py"),
}
"""Side -> arguments of Python."""
FIRST_STEP = "step 1/1"
GRAPH = build_graph()
PLAN = build_plan(GRAPH, vision=(2, 1, 1), llm=(2, 3, 1))


class _Count(logging.Handler):
    """Counts the attempts that failed."""

    num_failed = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_failed += 1


_COUNT = _Count()


def start() -> tuple[int, int]:
    """Make all groups on this rank, and use each; returns the attempts that failed since its process began, and the groups."""
    if _COUNT not in create_groups.logger.handlers:
        create_groups.logger.addHandler(_COUNT)
    rank, book = dist.get_rank(), GroupBook(rank=dist.get_rank(), timeout=TIMEOUT)
    rank_sets = sorted(set(group_ranks(GRAPH, PLAN)))
    book.create(rank_sets)
    own = [book[ranks] for ranks in rank_sets if rank in ranks]
    own += [SampleExchange(rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)._group, BackgroundSave(TIMEOUT)._group]
    for group in own:
        number = torch.ones(1)
        dist.all_reduce(number, group=group)
        assert int(number) == group.size()
    dist.barrier()
    return _COUNT.num_failed, len(rank_sets) + 3


def compute_for_ever() -> None:
    """Keep a core busy."""
    while True:
        pass


def measure_first_step(arguments: Sequence[str], *, bytecode: str) -> tuple[float, float]:
    """Launch; returns the seconds until the line of the first step, and the processor seconds of all until they have ended.

    bytecode: the folder of what Python has compiled. Raises SystemExit if there was no such line.
    """
    before, begin, first = os.times(), time.monotonic(), 0.0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        said = []
        for line in run.stdout or ():
            said.append(line)
            if line.startswith(FIRST_STEP):
                first = time.monotonic() - begin
    if run.returncode or not first:
        raise SystemExit("".join([f"{' '.join(command)} ended with exit code {run.returncode}:\n", *said]))
    after = os.times()
    return first, after.children_user + after.children_system - before.children_user - before.children_system


def compare_first_steps(num_turns: int) -> None:
    """Launch both sides in turn, and print a line for each."""
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in LAUNCHES}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = os.environ.get("PYTHONPYCACHEPREFIX", folder)
        for turn in range(num_turns + 1):
            for side, arguments in LAUNCHES.items():
                measured = measure_first_step(arguments, bytecode=bytecode)
                if turn:
                    found[side].append(measured)
    for side, rows in found.items():
        seconds, processor = ([row[index] for row in rows] for index in (0, 1))
        spread = f"{median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        print(f"{side}: step 1 after {spread}, {median(processor):.1f} s of processors")
    for index, what in enumerate(("seconds", "processor seconds of all")):
        here, there = ([row[index] for row in rows] for rows in found.values())
        work = f"the digits' four processes to the first step: {what}"
        print_rows({work: compare(here, there)}, peer="a plain script of torch's DDP under torchrun")


def main(argv: Sequence[str] | None = None) -> int:
    """Start again and again; returns the number of starts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="starts, or turns of --first-step")
    parser.add_argument("--first-step", action="store_true", help="measure launches until their first step")
    parser.add_argument("--load", type=int, default=0, help="processes beside it that only compute")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no start after so long")
    arguments = parser.parse_args(argv)
    if arguments.first_step:
        compare_first_steps(arguments.number)
        return 0
    pool = RankPool(NUM_RANKS)
    busy = [multiprocessing.get_context("fork").Process(target=compute_for_ever, daemon=True) for _ in range(arguments.load)]
    for process in busy:
        process.start()
    begin, num_starts, num_failed, attempts, num_groups = time.monotonic(), 0, 0, [0] * NUM_RANKS, 0
    try:
        while num_starts < arguments.number and time.monotonic() - begin < arguments.seconds:
            num_starts += 1
            try:
                answers = pool.run(start, world_size=NUM_RANKS)
            except RankError as problem:
                num_failed += 1
                print(f"start {num_starts} failed:\n{problem}", flush=True)
                continue
            attempts, num_groups = [told for told, _ in answers], answers[0][1]
    finally:
        for process in busy:
            process.kill()
        pool.close()
    seconds = (time.monotonic() - begin) / max(1, num_starts)
    print(
        f"{num_starts} starts of {NUM_RANKS} ranks and {num_groups} groups beside {arguments.load} busy processes: "
        f"{max(attempts)} attempts repeated, {num_failed} starts failed; {seconds:.2f} s each"
    )
    return num_failed


if __name__ == "__main__":
    sys.exit(bool(main()))
