"""tools/launch.py starts ranks as torchrun does; of a run that fails, Braid's own message remains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import HANG_SECONDS, REPOSITORY, as_arguments
from tests.distributed.small_run import working_flags, write_working_files
from tests.distributed.test_stopped_ranks import wait_for_steps
from tools.launch import free_port


@pytest.mark.parametrize("more", [(), ("--max-restarts", 0)], ids=["forked", "by torchrun"])
def test_a_failed_run_ends_in_one_line_and_with_its_own_exit_code(tmp_path: Path, more: tuple[object, ...]) -> None:
    place = ("--nproc-per-node", 3, "--master-port", free_port(), *more)
    command = [sys.executable, REPOSITORY / "tools" / "launch.py", *place, REPOSITORY / "pretrain_mllm.py", "--lr", "high"]
    ended = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "pretrain_mllm.py: error: argument --lr: expected a number, found 'high' [ConfigError, rank 0]\n"


def test_signals_reach_ranks_and_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    flags = {**working_flags(tmp_path), "--train-iters": 10**6, "--log-json": tmp_path / "log.jsonl"}
    for victim, number, exit_code in [("launcher", signal.SIGTERM, 0), ("rank", signal.SIGKILL, 137)]:
        (tmp_path / "log.jsonl").unlink(missing_ok=True)
        place = ("--nproc-per-node", 2, "--master-port", free_port(), REPOSITORY / "pretrain_mllm.py")
        command = [sys.executable, REPOSITORY / "tools" / "launch.py", *place, *as_arguments(flags)]
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
            wait_for_steps(tmp_path, 1)
            ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            assert len(ranks) == 2
            os.kill(launcher.pid if victim == "launcher" else int(ranks[1]), number)
            said, _ = launcher.communicate(timeout=HANG_SECONDS)
        assert launcher.returncode == exit_code, said
        assert ("stopped by SIGTERM after step" if victim == "launcher" else "rank 0 lost its connection to rank 1") in said, said
