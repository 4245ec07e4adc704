"""Ranks that are stopped, killed or frozen while they train: what is left ends by itself, and says truthfully why."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from tests.distributed.launch import HANG_SECONDS, as_arguments, launch
from tests.distributed.small_run import working_flags, write_working_files

NUM_RANKS = 3
FROZEN_SECONDS = 15
"""--distributed-timeout where it has to pass; elsewhere no slow machine may come to it."""
ENDLESS = 10**6


def logged_steps(folder: Path) -> list[int]:
    """The steps in the log, but for a line that is being written."""
    log = folder / "log.jsonl"
    lines = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_until(has_happened: Callable[[], bool], what: str, *, pause_seconds: float = 0.05) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not has_happened():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(pause_seconds)


def wait_for_steps(folder: Path, count: int) -> None:
    wait_until(lambda: len(logged_steps(folder)) >= count, f"step {count}")


def have_ended(processes: Sequence[int]) -> bool:
    return not any(is_running(process) for process in processes)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def send(number: signal.Signals, *ranks: int) -> Callable[[Sequence[int]], None]:
    def act(processes: Sequence[int]) -> None:
        for rank in ranks:
            os.kill(processes[rank], number)

    return act


def terminate_twice(processes: Sequence[int]) -> None:
    """End all but a frozen rank, which keeps the others from finishing the step."""

    def has_ended() -> bool:
        """Send SIGTERM again and again: one that follows another too soon does not count."""
        if is_running(processes[1]):
            os.kill(processes[1], signal.SIGTERM)
        return have_ended(processes[:2])

    os.kill(processes[2], signal.SIGSTOP)
    wait_until(has_ended, "end of those that are not frozen", pause_seconds=0.5)
    os.kill(processes[2], signal.SIGKILL)


def freeze_first(processes: Sequence[int]) -> None:
    """Freeze the rank that has the store, too: the others lose it with it."""
    os.kill(processes[0], signal.SIGSTOP)
    wait_until(lambda: have_ended(processes[1:]), "end of those that are not frozen")
    os.kill(processes[0], signal.SIGKILL)


class Stop(NamedTuple):
    happens: Callable[[Sequence[int]], None] | None
    """To the processes, once they have trained five steps; None: nothing."""
    exit_codes: tuple[int, ...]
    words: tuple[str, ...]
    """Parts of the one message; {last} is the last step, {newest} its checkpoint."""
    flags: tuple[object, ...] = ()
    has_store: bool = True
    """False if ranks lose the store of rank 0, without which they cannot tell who speaks: several say the same."""


SAVED, LOST = " after step {last}; checkpoint {newest}", ("error:", "lost its connection to rank ")
BACKGROUND, FROZEN = ("--async-save", "--save-interval", 2), ("--distributed-timeout-minutes", FROZEN_SECONDS / 60)
STOPS = {
    "all ranks, saving in the background": Stop(
        send(signal.SIGTERM, 0, 1, 2), (0, 0, 0), (f"stopped by SIGTERM{SAVED}",), BACKGROUND
    ),
    "one rank": Stop(send(signal.SIGUSR1, 2), (0, 0, 0), (f"stopped by SIGUSR1{SAVED}",)),
    "a time limit": Stop(None, (0, 0, 0), (f"stopped by --exit-duration-in-mins{SAVED}",), ("--exit-duration-in-mins", 0.02)),
    "a second SIGTERM": Stop(terminate_twice, (143, 143, -signal.SIGKILL), ("ended by SIGTERM while training",)),
    "an interrupt": Stop(send(signal.SIGINT, 0, 1, 2), (130, 130, 130), ("ended by SIGINT while training",)),
    "the first rank is killed": Stop(
        send(signal.SIGKILL, 0), (-signal.SIGKILL, 1, 1), (*LOST, "connection to rank 0"), has_store=False
    ),
    "the last rank is killed": Stop(send(signal.SIGKILL, 2), (1, 1, -signal.SIGKILL), (*LOST, "connection to rank 2")),
    "the first rank is frozen": Stop(freeze_first, (-signal.SIGKILL, 1, 1), ("rank 0", "frozen"), FROZEN, has_store=False),
}
ALWAYS = ("one rank", "a second SIGTERM", "an interrupt", "the first rank is killed", "the first rank is frozen")


@pytest.mark.deep(when=lambda stop: stop not in ALWAYS)
@pytest.mark.parametrize("stop", STOPS)
def test_what_is_left_ends_with_one_message_that_says_why(tmp_path: Path, stop: str) -> None:
    row, saved = STOPS[stop], tmp_path / "saved"
    write_working_files(tmp_path)
    changed = {"--train-iters": ENDLESS, "--log-json": tmp_path / "log.jsonl", "--llm-pp": 2, "--num-workers": 1, "--save": saved}

    def when_training(processes: Sequence[int]) -> None:
        if row.happens is not None:
            wait_for_steps(tmp_path, 5)
            row.happens(processes)

    flags = [*as_arguments({**working_flags(tmp_path), **changed}), *row.flags]
    ended = launch(flags, num_ranks=NUM_RANKS, meanwhile=when_training)
    assert ended.exit_codes == row.exit_codes, ended.output
    last, newest = logged_steps(tmp_path)[-1], find_newest_checkpoint(saved) if saved.exists() else None
    words = [each.format(last=last, newest=newest) for each in row.words]
    lines = ended.output.splitlines()
    messages = [line for line in lines if all(each in line for each in words)]
    assert len(messages) == 1 or (messages and not row.has_store), ended.output
    assert all(line in messages for line in lines if "error:" in line), ended.output
    assert 0 not in row.exit_codes or (newest is not None and newest.name == f"step_{last:08d}")
    assert "Traceback" not in ended.output and "frame #" not in ended.output
