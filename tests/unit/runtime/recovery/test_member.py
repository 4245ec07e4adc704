"""A rank that leaves, and one that cannot."""

import threading
import time
from typing import NoReturn

import pytest

from megatron.runtime.launch.failure import Ending, RanksLostError
from megatron.runtime.recovery import member
from megatron.runtime.recovery.connections import Connections
from megatron.runtime.recovery.member import Member


class RaisingEnding(Ending):
    """Raises the problem in place of ending the process."""

    def fail(self, problem: BaseException) -> NoReturn:
        """Raise it."""
        raise problem


class Work:
    """What a collective gives."""

    wait = time.sleep


@pytest.fixture
def waiting() -> Member:
    """Return a rank whose main thread (another one, here) waits for others."""
    found = Member.__new__(Member)
    found.connections, found._ending, found._has_left = Connections(), RaisingEnding(), False
    thread = threading.Thread(target=lambda: Work.wait(60), daemon=True)
    thread.start()
    assert thread.ident is not None
    found._main = thread.ident
    limit = threading.Timer(20, lambda: setattr(found, "_has_left", True))
    limit.daemon = True
    limit.start()
    return found


def test_a_wait_that_a_cut_does_not_end_ends_the_process(waiting: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RanksLostError, match="goes on though all connections are cut"):
        waiting._cut_until_left()


def test_a_gpu_may_be_waited_for_and_who_has_left_is_let_go(waiting: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    threading.Timer(0.5, lambda: setattr(waiting, "_has_left", True)).start()
    waiting._cut_until_left()
