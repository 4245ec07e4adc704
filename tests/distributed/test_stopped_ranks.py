"""Ranks that are stopped, killed or frozen while they train: what is left ends by itself, and says truthfully why."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.launch.meeting import wait_until
from tests.distributed.happenings import HAPPENINGS
from tests.distributed.launch import HANG_SECONDS, as_arguments, launch, read_log, state_of
from tests.distributed.small_run import working_flags, write_working_files

NUM_RANKS = 3
FROZEN_SECONDS = 15
"""--distributed-timeout where it has to pass; elsewhere no slow machine may come to it."""
ENDLESS = 10**6


def end_frozen(processes: Sequence[int], *, frozen: int, told: int | None = None) -> None:
    """Kill a frozen rank when all others have ended, of which one is told to (SIGTERM) again and again."""

    def others_have_ended() -> bool:
        if told is not None and state_of(processes[told]) != "Z":
            os.kill(processes[told], signal.SIGTERM)  # one that follows another too soon does not count
        return all(state_of(process) == "Z" for rank, process in enumerate(processes) if rank != frozen)

    assert wait_until(lambda: state_of(processes[frozen]) == "T", seconds=HANG_SECONDS), "none is frozen"
    assert wait_until(others_have_ended, seconds=HANG_SECONDS, pause_seconds=0.5), "what is not frozen does not end"
    os.kill(processes[frozen], signal.SIGKILL)


class Stop(NamedTuple):
    happenings: str
    exit_codes: tuple[int, ...]
    words: tuple[str, ...]
    """Parts of the one message; {last} is the last step, {newest} its checkpoint."""
    flags: tuple[object, ...] = ()
    has_store: bool = True
    """False if ranks lose the store of rank 0, without which they cannot tell who speaks: several say the same."""
    meanwhile: Callable[[Sequence[int]], None] | None = None
    """What is done to the processes."""


SAVED, LOST = " after step {last}; checkpoint {newest}", ("error:", "lost its connection to rank ")
BACKGROUND, FROZEN = ("--async-save", "--save-interval", 2), ("--distributed-timeout-minutes", FROZEN_SECONDS / 60)
STOPS = {
    "all ranks, saving in the background": Stop("all:step:6:TERM", (0, 0, 0), (f"stopped by SIGTERM{SAVED}",), BACKGROUND),
    "one rank": Stop("2:step:6:USR1", (0, 0, 0), (f"stopped by SIGUSR1{SAVED}",)),
    "a time limit": Stop("", (0, 0, 0), (f"stopped by --exit-duration-in-mins{SAVED}",), ("--exit-duration-in-mins", 0.02)),
    "a second SIGTERM": Stop(
        "2:step:6:STOP",
        (143, 143, -signal.SIGKILL),
        ("ended by SIGTERM while training",),
        meanwhile=partial(end_frozen, frozen=2, told=1),
    ),
    "an interrupt": Stop("all:step:6:INT", (130, 130, 130), ("ended by SIGINT while training",)),
    "the first rank is killed": Stop(
        "0:forward:6:KILL", (-signal.SIGKILL, 1, 1), (*LOST, "connection to rank 0"), has_store=False
    ),
    "the last rank is killed": Stop("2:forward:6:KILL", (1, 1, -signal.SIGKILL), (*LOST, "connection to rank 2")),
    "the first rank is frozen": Stop(
        "0:step:6:STOP",
        (-signal.SIGKILL, 1, 1),
        ("rank 0", "frozen"),
        FROZEN,
        has_store=False,
        meanwhile=partial(end_frozen, frozen=0),
    ),
}
ALWAYS = ("one rank", "a second SIGTERM", "an interrupt", "the first rank is killed", "the first rank is frozen")


@pytest.mark.deep(when=lambda stop: stop not in ALWAYS)
@pytest.mark.parametrize("stop", STOPS)
def test_what_is_left_ends_with_one_message_that_says_why(tmp_path: Path, stop: str) -> None:
    row, saved = STOPS[stop], tmp_path / "saved"
    write_working_files(tmp_path)
    changed = {"--train-iters": ENDLESS, "--log-json": tmp_path / "log.jsonl", "--llm-pp": 2, "--num-workers": 1, "--save": saved}
    flags = [*as_arguments({**working_flags(tmp_path), **changed}), *row.flags]
    ended = launch(flags, num_ranks=NUM_RANKS, environment={HAPPENINGS: row.happenings}, meanwhile=row.meanwhile)
    assert ended.exit_codes == row.exit_codes, ended.output
    last, newest = read_log(tmp_path / "log.jsonl")[-1]["step"], find_newest_checkpoint(saved) if saved.exists() else None
    words = [each.format(last=last, newest=newest) for each in row.words]
    lines = ended.output.splitlines()
    messages = [line for line in lines if all(each in line for each in words)]
    assert len(messages) == 1 or (messages and not row.has_store), ended.output
    assert all(line in messages for line in lines if "error:" in line), ended.output
    assert 0 not in row.exit_codes or (newest is not None and newest.name == f"step_{last:08d}")
    assert "Traceback" not in ended.output and "frame #" not in ended.output
