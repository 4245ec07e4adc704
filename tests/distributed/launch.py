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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

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
    port = free_port()
    words = as_arguments(flags) if isinstance(flags, Mapping) else flags
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of every address; not all networks answer
            **(environment or {}),
            **(environment_of_rank or {}).get(rank, {}),
        }
        for rank in range(num_ranks)
    ]
    ranks = [
        _Rank(tuple(str(flag) for flag in (*words, *(flags_of_rank or {}).get(rank, ()))), own, folder)
        for rank, own in enumerate(environments)
    ]
    run = _run_programs if is_new_program else _run_forks
    exit_codes, outputs = run(ranks, start + timeout_seconds, meanwhile or (lambda processes: None))
    return Launched(tuple(exit_codes), tuple(outputs), time.monotonic() - start)


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
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry for entry in entries if "evaluation" not in entry], launched


class _Rank(NamedTuple):
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path


def _run_programs(
    ranks: Sequence[_Rank], deadline: float, meanwhile: Callable[[Sequence[int]], None]
) -> tuple[list[int], list[str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, str(REPOSITORY / "pretrain_mllm.py"), *rank.flags],
            cwd=rank.folder,
            env={**os.environ, **rank.environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in ranks
    ]
    try:
        meanwhile([process.pid for process in processes])
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def _run_forks(
    ranks: Sequence[_Rank], deadline: float, meanwhile: Callable[[Sequence[int]], None]
) -> tuple[list[int], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            Forked("pretrain_mllm.py", rank.flags, rank.environment, folder=rank.folder, output=Path(folder) / str(index))
            for index, rank in enumerate(ranks)
        ]
        try:
            meanwhile([process.pid for process in processes])
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as late:
            raise subprocess.TimeoutExpired(f"{late.cmd}:\n{''.join(each.said for each in processes)}", deadline) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return codes, [process.said for process in processes]


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
            logging.getLogger().handlers.clear()
            sys.modules.pop("pretrain_mllm", None)  # it says what is to be warned of
            forkserver.main(listener, is_needed, _PRELOADED)
    finally:
        os._exit(0)


def _run_program(*given: Any) -> None:
    from tests.distributed.forked_programs import run  # only in the forked process: it imports torch

    run(*given)
