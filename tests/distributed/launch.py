"""Runs pretrain_mllm.py as a launcher would: one process per rank, all of which must end by themselves."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    flags: Sequence[object], *, num_ranks: int, timeout_seconds: float = 120.0, environment: Mapping[str, str] | None = None
) -> Launched:
    """Start `num_ranks` ranks and wait; raises TimeoutExpired (after killing them) when one does not end."""
    start = time.monotonic()
    port = _free_port()
    processes = [_start(flags, rank=rank, num_ranks=num_ranks, port=port, further=environment or {}) for rank in range(num_ranks)]
    try:
        outputs = [process.communicate(timeout=max(1.0, timeout_seconds - time.monotonic() + start))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Launched(tuple(process.returncode for process in processes), "".join(outputs), time.monotonic() - start)


def _start(flags: Sequence[object], *, rank: int, num_ranks: int, port: int, further: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        **further,
    }
    command = [sys.executable, str(REPOSITORY / "pretrain_mllm.py"), *map(str, flags)]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
