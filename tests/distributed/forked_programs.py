"""What runs are started by, in processes that were forked after everything slow to import was imported.

The supervisor forks its ranks, where one that is started as a program has another process do so, which imports everything first.
"""

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pretrain_mllm  # first, as it says how much torch is to log

# isort: split
import torch
import torch._dynamo  # optimizers do
from PIL import Image

import megatron.runtime.training.elastic  # noqa: F401 - what ranks of elastic runs need beside what those of other runs do
from megatron.runtime.generation import sample_prompts
from megatron.runtime.recovery import supervisor
from megatron.runtime.training import loop, prediction
from megatron.runtime.training import run as training_run
from tests.distributed.added_rows import ADDS_ROWS, add_rows
from tests.distributed.happenings import HAPPENINGS, plant
from tests.distributed.recorded_nodes import CALLS, recording_nodes
from tests.unit.plan.planners.planning_cases import few_planners
from tools import launch as launcher

launcher.import_for_ranks()
Image.init()  # imports what reads each format
prediction._SAMPLES_OF_LAYERS = 64  # drawing a thousand takes a rank longer than the steps of a test
training_run.find_peak_tflops = cache(training_run.find_peak_tflops)
for _dtype in (torch.float64, torch.float32):
    training_run.find_peak_tflops(_dtype)  # of this machine, once for all ranks


def supervise(argv: Sequence[str]) -> int:
    flags, command = supervisor.read_flags(argv)
    supervisor.ask_within = ask_within
    return supervisor.Supervisor(flags, command, start_method="fork").run()


def ask_within(seconds: float, question: Any, ask: Any = supervisor.ask_within) -> Any:
    """Ask, until the thread that asked has gone: while it ends it may hold OpenSSL's locks, and ranks are forked from here."""
    threads = {*os.listdir("/proc/self/task")}
    answer = ask(seconds, question)
    while {*os.listdir("/proc/self/task")} - threads:
        time.sleep(0.001)
    return answer


def run_tool(name: str, argv: list[str]) -> int | None:
    module: Any = importlib.import_module(f"tools.{name}")
    code: int | None = module.main(argv)
    return code


def run_text(argv: list[str]) -> None:
    text, *sys.argv[1:] = argv
    exec(text, {"__name__": "__main__"})


ASKS_FOR_BETTER = "BRAID_TEST_ASKS_FOR_BETTER"
"""Environment variable: a run looks for a better balancer and schedule, which takes as long as its steps."""


def answer_in_a_fork() -> None:
    """Have the model in training (--sample-prompts) asked in a process that is forked now; what users run starts Python anew."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=_answer, args=(ours, theirs), daemon=True).start()

    def run(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
        ours.send(command[3:])
        return subprocess.CompletedProcess(command, 0, "", ours.recv())

    sample_prompts.subprocess = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]


def _answer(ours: Connection, theirs: Connection) -> None:
    ours.close()  # so that the end of the run is the end of the file
    with suppress(EOFError):
        while True:
            asked, said = theirs.recv(), ""
            try:
                sample_prompts.main(asked)
            except SystemExit as problem:
                said = str(problem)
            theirs.send(said)


PROGRAMS: dict[str, Callable[[list[str]], int | None]] = {
    "pretrain_mllm.py": pretrain_mllm.main,
    "-c": run_text,
    **{f"tools/{name}.py": partial(run_tool, name) for name in ("generate", "launch", "lengths", "plan", "producer")},
    "supervisor": supervise,
    "keeper of the store": supervisor.main,
}
gc.freeze()  # a process's collections would touch, and so copy, the memory that all share


def run(program: str, argv: Sequence[str], environment: Mapping[str, str], folder: str, output: str) -> None:
    """Run a program in `folder`; output: file that gets what it, and those whom it starts, print."""
    multiprocessing.set_start_method("fork", force=True)  # loader workers start as they do in a program of their own
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    sys.argv = [program, *argv]
    if ADDS_ROWS in environment:
        add_rows()
    if ASKS_FOR_BETTER not in environment:
        loop.describe_better_pair = lambda *args, **how: None
    if HAPPENINGS in environment:
        plant(environment[HAPPENINGS])
    if environment.get("RANK") == "0" and any(word.startswith("--sample-prompts") for word in argv):
        answer_in_a_fork()
    planners = few_planners() if program == "pretrain_mllm.py" else nullcontext()  # in runs with --plan auto
    with planners, recording_nodes() if CALLS in environment else nullcontext():
        code = PROGRAMS[program]([*argv])
    sys.exit(code)
