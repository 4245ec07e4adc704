"""Runs pretrain_mllm.py as a launcher would: one process per rank, all of which must end by themselves; and other programs."""

import json
import logging
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tools.launch import free_port

REPOSITORY = Path(__file__).parents[2]

_PRELOADED = ["tests.distributed.forked_programs"]
HANG_SECONDS = 600.0
"""After which a run hangs, however slow the machine is."""


@dataclass(frozen=True)
class Launched:
    exit_codes: tuple[int, ...]
    """By rank."""
    outputs: tuple[str, ...]
    """Standard output and error, by rank."""
    seconds: float

    @property
    def output(self) -> str:
        return "".join(self.outputs)


def launch(
    flags: Mapping[str, object] | Sequence[object],
    *,
    num_ranks: int,
    timeout_seconds: float = HANG_SECONDS,
    environment: Mapping[str, str] | None = None,
    is_new_program: bool = False,
    flags_of_rank: Mapping[int, Sequence[object]] | None = None,
    environment_of_rank: Mapping[int, Mapping[str, str]] | None = None,
    meanwhile: Callable[[Sequence[int]], None] | None = None,
    folder: Path = REPOSITORY,
) -> Launched:
    """Start `num_ranks` ranks and wait; raises TimeoutExpired (after killing them) when one does not end.

    flags_of_rank, environment_of_rank: what single ranks get beside (and after) what all get.
    meanwhile: called once with the ranks' process ids, to send them signals.
    folder: that they work in.
    is_new_program: start Python anew for every rank, as a user does; else ranks are forked from a process that has imported
    torch and megatron-core, which saves seconds each.
    """
    start = time.monotonic()
    words = as_arguments(flags) if isinstance(flags, Mapping) else flags
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of every address; not all networks answer
        **(environment or {}),
    }
    program = "pretrain_mllm.py"
    begin = partial(Started, str(REPOSITORY / program)) if is_new_program else partial(Forked, program)
    with tempfile.TemporaryDirectory() as outputs:
        processes = [
            begin(
                [str(flag) for flag in (*words, *(flags_of_rank or {}).get(rank, ()))],
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment_of_rank or {}).get(rank, {})},
                folder=folder,
                output=Path(outputs) / str(rank),
            )
            for rank in range(num_ranks)
        ]
        try:
            if meanwhile is not None:
                meanwhile([process.pid for process in processes])
            codes = [process.wait(max(1.0, start + timeout_seconds - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as late:
            said = "".join(each.said for each in processes)
            raise subprocess.TimeoutExpired(f"{late.cmd}:\n{said}", timeout_seconds) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return Launched(tuple(codes), tuple(process.said for process in processes), time.monotonic() - start)


def as_arguments(flags: Mapping[str, object]) -> list[object]:
    """Return flags as they stand on a command line; None: a switch, a list or tuple: several values."""
    listed: list[object] = []
    for flag, value in flags.items():
        listed += [flag, *(value or ())] if value is None or isinstance(value, list | tuple) else [f"{flag}={value}"]
    return listed


def train(flags: Mapping[str, object], *, num_ranks: int, **how: Any) -> tuple[list[dict[str, Any]], Launched]:
    """Launch a run that must end well; returns the steps in its log (--log-json), which begins anew, and what it said.

    how: options of `launch`.
    """
    log = Path(str(flags.get("--log-json", os.devnull)))
    if log.is_file():
        log.unlink()
    launched = launch(flags, num_ranks=num_ranks, **how)
    assert launched.exit_codes == (0,) * num_ranks, launched.output
    return read_steps(log), launched


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return what a run has logged so far (--log-json), but for a line that it is writing."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_steps(log: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_log(log) if "evaluation" not in entry]


def state_of(process: int) -> str:
    """Return T of one that is frozen, Z of one that has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class Started(subprocess.Popen[bytes]):
    """A program in a Python that starts anew; as `Forked` otherwise."""

    def __init__(
        self, program: str, argv: Sequence[str], environment: Mapping[str, str], *, folder: Path = REPOSITORY, output: Path
    ) -> None:
        """program: its file, or `-m`, with the module first in argv."""
        self.output, given = output, {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        with output.open("wb") as file:
            super().__init__([sys.executable, program, *argv], cwd=folder, env=given, stdout=file, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.output.read_text()


class Forked:
    """A program of `forked_programs.py`, in a process forked from one that has imported torch and megatron-core."""

    def __init__(
        self,
        program: str,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        folder: Path = REPOSITORY,
        output: Path = Path(os.devnull),
    ) -> None:
        self.program, self.argv, self.output = program, argv, output
        given = (program, [*argv], {**(environment or {})}, str(folder), str(output))
        self._process: Any = forking_context().Process(target=_run_program, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        found: int = self._process.pid
        return found

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([self.program, *self.argv], timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def forking_context() -> ForkServerContext:
    """Return what starts processes from one that has imported torch and megatron-core."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def fork_server() -> None:
    """Fork the server of `forking_context` from this process, which has imported most of it; else it would start Python anew."""
    server: Any = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        is_needed, needs = os.pipe()
        if not (process := os.fork()):
            os.close(needs)
            _serve_forks(listener.fileno(), is_needed)
        os.close(is_needed)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, needs, process


def _serve_forks(listener: int, is_needed: int) -> None:
    """Import the rest at the first request, as a program would that begins: streams and logging are not pytest's."""
    try:
        if is_needed not in select.select([listener, is_needed], [], [])[0]:
            sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
            threading.excepthook = threading.__excepthook__
            logging.getLogger().handlers.clear()
            sys.modules.pop("pretrain_mllm", None)  # it says what is to be warned of
            forkserver.main(listener, is_needed, _PRELOADED)
    finally:
        os._exit(0)


def _run_program(*given: Any) -> None:
    from tests.distributed.forked_programs import run  # only in the forked process: it imports torch

    run(*given)
