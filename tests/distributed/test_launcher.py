"""tools/launch.py starts ranks as torchrun does; of a run that fails, Braid's own message remains."""

import os
import signal
from pathlib import Path

import pytest

from tests.distributed.launch import HANG_SECONDS, REPOSITORY, Forked, as_arguments
from tests.distributed.small_run import working_flags, write_working_files
from tests.distributed.test_stopped_ranks import wait_for_steps
from tools.launch import free_port


@pytest.mark.parametrize("more", [(), ("--max-restarts", 0)], ids=["forked", "by torchrun"])
def test_a_failed_run_ends_in_one_line_and_with_its_own_exit_code(tmp_path: Path, more: tuple[object, ...]) -> None:
    place = ("--nproc-per-node", 2, "--master-port", free_port(), *more, REPOSITORY / "pretrain_mllm.py")
    launcher = Forked("tools/launch.py", [*map(str, place), "--lr", "high"], folder=tmp_path, output=tmp_path / "output")
    assert launcher.wait(HANG_SECONDS) == 2
    assert launcher.said == "pretrain_mllm.py: error: argument --lr: expected a number, found 'high' [ConfigError, rank 0]\n"


@pytest.mark.parametrize(("victim", "number", "exit_code"), [("launcher", signal.SIGTERM, 0), ("rank", signal.SIGKILL, 137)])
def test_signals_reach_ranks_and_a_killed_rank_ends_the_run(
    tmp_path: Path, victim: str, number: signal.Signals, exit_code: int
) -> None:
    write_working_files(tmp_path)
    flags = {**working_flags(tmp_path), "--train-iters": 10**6, "--log-json": tmp_path / "log.jsonl"}
    place = ("--nproc-per-node", 2, "--master-port", free_port(), REPOSITORY / "pretrain_mllm.py")
    launcher = Forked("tools/launch.py", [*map(str, (*place, *as_arguments(flags)))], output=tmp_path / "output")
    try:
        wait_for_steps(tmp_path, 1)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(ranks) == 2
        os.kill(launcher.pid if victim == "launcher" else int(ranks[1]), number)
        assert launcher.wait(HANG_SECONDS) == exit_code, launcher.said
    finally:
        launcher.kill()
    said = "stopped by SIGTERM after step" if victim == "launcher" else "rank 0 lost its connection to rank 1"
    assert said in launcher.said, launcher.said
