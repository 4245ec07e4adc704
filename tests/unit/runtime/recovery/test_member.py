"""A rank that leaves, and one whose thread cannot."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from megatron.runtime.launch.meeting import wait_until
from megatron.runtime.recovery import member
from megatron.runtime.recovery.connections import Connections
from megatron.runtime.recovery.member import LeftBehindError, Member, find_standstill


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Work:
    """What a collective gives."""

    wait = os.read


class Pipe(NamedTuple):
    """What threads wait for."""

    reading: int
    writing: int


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Return an empty pipe."""
    found = Pipe(*os.pipe())
    yield found
    for end in found:
        os.close(end)


@pytest.fixture
def ended() -> list[str]:
    """Return the names of the errors that ended threads."""
    return []


@pytest.fixture
def waiting(pipe: Pipe, ended: list[str]) -> Member:
    """Return a rank in its third generation, whose training thread waits for others."""
    found = Member.__new__(Member)
    found.connections, found.generation, found._has_left, found._lock = Connections(), 3, False, threading.Lock()

    def train() -> None:
        try:
            Work.wait(pipe.reading, 1)
        except BaseException as problem:
            ended.append(type(problem).__name__)

    found._trainer = start(train)
    limit = threading.Timer(20, lambda: setattr(found, "_has_left", True))
    limit.daemon = True
    limit.start()
    return found


def test_a_thread_that_waits_in_vain_is_replaced(
    waiting: Member, pipe: Pipe, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    first, went_on = waiting._trainer, threading.Event()
    waiting.go_on = lambda: (waiting.check_in_charge(), went_on.set())
    waiting._cut_until_left(3)
    assert went_on.wait(20) and waiting._trainer is not first
    with pytest.raises(LeftBehindError):
        waiting.check_in_charge()  # as this thread is not it
    os.write(pipe.writing, b"x")
    first.join(20)
    assert ended == ["LeftBehindError"], "its wait ends, much later"


def test_a_gpu_may_be_waited_for_and_who_has_left_is_let_go(waiting: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    first = waiting._trainer
    waiting.go_on = lambda: None
    threading.Timer(0.5, lambda: setattr(waiting, "_has_left", True)).start()
    waiting._cut_until_left(3)
    assert waiting._trainer is first


def test_a_signal_to_a_generation_that_was_left_cuts_nothing(waiting: Member) -> None:
    waiting._cut_until_left(2)
    assert not waiting.connections.is_cut


def test_a_thread_stands_still_only_while_it_waits_for_others(pipe: Pipe) -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    waiting = start(lambda: Work.wait(pipe.reading, 1))
    computing, reading = start(compute), start(lambda: os.read(pipe.reading, 1))
    assert wait_until(lambda: (seen := find_standstill(waiting)) is not None and find_standstill(waiting) == seen, seconds=100)
    assert find_standstill(computing) is None and find_standstill(reading) is None
    stop.set()
    os.write(pipe.writing, b"x")
    os.write(pipe.writing, b"x")
    waiting.join(20)
    reading.join(20)
    assert find_standstill(waiting) is None
