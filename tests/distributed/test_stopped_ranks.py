"""Ranks that are stopped, killed or frozen while they train: what is left ends by itself, and says truthfully why."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from tests.distributed.launch import HANG_SECONDS, Launched, as_arguments, launch
from tests.distributed.small_run import working_flags, write_working_files

NUM_RANKS = 3
FROZEN_SECONDS = 15
"""--distributed-timeout where it has to pass; elsewhere no slow machine may come to it."""
ENDLESS = 10**6


def train(folder: Path, *flags: object, meanwhile: Callable[[Sequence[int], Path], None] | None = None) -> Launched:
    """Start a run that would go on for hours; `meanwhile` gets the process ids once it has trained five steps."""
    write_working_files(folder)
    changed = {"--train-iters": ENDLESS, "--log-json": folder / "log.jsonl", "--llm-pp": 2, "--num-workers": 1}
    kept = {**working_flags(folder), **changed}

    def when_training(processes: Sequence[int]) -> None:
        if meanwhile is not None:
            wait_for_steps(folder, 5)
            meanwhile(processes, folder)

    return launch([*as_arguments(kept), *flags], num_ranks=NUM_RANKS, meanwhile=when_training)


def logged_steps(folder: Path) -> list[int]:
    """The steps in the log, but for a line that is being written."""
    log = folder / "log.jsonl"
    lines = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while len(logged_steps(folder)) < count:
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.05)


def wait_for_end(processes: Sequence[int]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while any(is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_running(process) for process in processes)


def terminate_until_it_ends(process: int) -> None:
    """Send SIGTERM again and again: one that follows another too soon does not count."""
    deadline = time.monotonic() + HANG_SECONDS
    while is_running(process) and time.monotonic() < deadline:
        os.kill(process, signal.SIGTERM)
        time.sleep(0.5)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def send(number: signal.Signals, *ranks: int) -> Callable[[Sequence[int], Path], None]:
    def act(processes: Sequence[int], folder: Path) -> None:
        for rank in ranks:
            os.kill(processes[rank], number)

    return act


STOPS: dict[str, tuple[str, Callable[[Sequence[int], Path], None] | None, tuple[object, ...]]] = {
    "all ranks, saving in the background": ("SIGTERM", send(signal.SIGTERM, 0, 1, 2), ("--async-save", "--save-interval", 2)),
    "one rank": ("SIGUSR1", send(signal.SIGUSR1, 2), ()),
    "a time limit": ("--exit-duration-in-mins", None, ("--exit-duration-in-mins", 0.02)),
}


@pytest.mark.deep(when=lambda stop: stop != "one rank")
@pytest.mark.parametrize("stop", STOPS)
def test_what_stops_a_run_saves_and_ends_well(tmp_path: Path, stop: str) -> None:
    (reason, meanwhile, flags), saved = STOPS[stop], tmp_path / "saved"
    ended = train(tmp_path, "--save", saved, *flags, meanwhile=meanwhile)
    assert ended.exit_codes == (0,) * NUM_RANKS, ended.output
    last, newest = logged_steps(tmp_path)[-1], find_newest_checkpoint(saved)
    assert newest is not None and newest.name == f"step_{last:08d}"
    assert f"stopped by {reason} after step {last}; checkpoint {newest}" in ended.output
    assert "Traceback" not in ended.output


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """The frozen rank keeps the others from finishing the step."""

    def terminate_twice(processes: Sequence[int], folder: Path) -> None:
        os.kill(processes[2], signal.SIGSTOP)
        terminate_until_it_ends(processes[1])
        assert wait_for_end(processes[:2])
        os.kill(processes[2], signal.SIGKILL)

    ended = train(tmp_path, meanwhile=terminate_twice)
    assert ended.exit_codes == (143, 143, -signal.SIGKILL), ended.output
    assert ended.output.count("ended by SIGTERM while training") == 1
    assert "Traceback" not in ended.output


def test_interrupting_shows_one_line(tmp_path: Path) -> None:
    ended = train(tmp_path, meanwhile=send(signal.SIGINT, 0, 1, 2))
    assert ended.exit_codes == (130,) * NUM_RANKS, ended.output
    assert ended.output.count("ended by SIGINT while training") == 1
    assert "Traceback" not in ended.output


@pytest.mark.deep(when=lambda killed: killed == 2)
@pytest.mark.parametrize("killed", [0, 2])
def test_the_others_say_that_a_rank_is_gone(tmp_path: Path, killed: int) -> None:
    ended = train(tmp_path, meanwhile=send(signal.SIGKILL, killed))
    others = [code for rank, code in enumerate(ended.exit_codes) if rank != killed]
    assert others == [1, 1], ended.output
    messages = [line for line in ended.output.splitlines() if "error:" in line]
    assert messages
    assert len(messages) == 1 or killed == 0  # without the store of rank 0, ranks cannot tell who speaks
    assert all(f"lost its connection to rank {killed}" in message for message in messages), messages
    assert "frame #" not in ended.output
    assert "Traceback" not in ended.output


def test_nobody_outlives_a_frozen_rank(tmp_path: Path) -> None:
    """The first, which has the store, too: the others lose it with it."""

    def freeze(processes: Sequence[int], folder: Path) -> None:
        os.kill(processes[0], signal.SIGSTOP)
        assert wait_for_end(processes[1:])
        os.kill(processes[0], signal.SIGKILL)

    ended = train(tmp_path, "--distributed-timeout-minutes", FROZEN_SECONDS / 60, meanwhile=freeze)
    assert ended.exit_codes[1:] == (1, 1), ended.output
    assert "rank 0" in ended.output
    assert "frozen" in ended.output
    assert "frame #" not in ended.output
