"""Runs pretrain_mllm.py as a launcher would: one process per rank, all of which must end by themselves."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Launched:
    """How a run ended."""

    exit_codes: tuple[int, ...]
    """By rank."""
    output: str
    """Standard output and error of all ranks."""
    seconds: float


def launch(
    flags: Sequence[object],
    *,
    num_ranks: int,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    is_new_program: bool = False,
) -> Launched:
    """Start `num_ranks` ranks and wait; raises TimeoutExpired (after killing them) when one does not end.

    is_new_program: start Python anew for every rank, as a user does; else ranks are forked from a process that has imported
    torch and megatron-core, which saves seconds each.
    """
    start = time.monotonic()
    port = _free_port()
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        for rank in range(num_ranks)
    ]
    run = _run_programs if is_new_program else _run_forks
    exit_codes, output = run([str(flag) for flag in flags], environments, start + timeout_seconds)
    return Launched(tuple(exit_codes), output, time.monotonic() - start)


def _run_programs(flags: Sequence[str], environments: Sequence[Mapping[str, str]], deadline: float) -> tuple[list[int], str]:
    command = [sys.executable, str(REPOSITORY / "pretrain_mllm.py"), *flags]
    processes = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **own}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for own in environments
    ]
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "".join(outputs)


def _run_forks(flags: Sequence[str], environments: Sequence[Mapping[str, str]], deadline: float) -> tuple[list[int], str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.launched_rank"])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(len(environments))]
        processes: list[Any] = [
            context.Process(target=_run_rank, args=(tuple(flags), own, str(output)))
            for own, output in zip(environments, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(1.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    raise subprocess.TimeoutExpired(["pretrain_mllm.py", *flags], deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()
        text = "".join(output.read_text() for output in outputs if output.exists())
        return [process.exitcode for process in processes], text


def _run_rank(flags: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    from tests.distributed.launched_rank import run_rank  # only in the forked process: it imports torch

    run_rank(flags, environment, str(REPOSITORY), output)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
