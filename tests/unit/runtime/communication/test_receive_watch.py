from threading import Event
from typing import Any

import pytest
import torch

from megatron.runtime.communication.message_channel import ReceiveWatch

CPU = torch.device("cpu")


class FakeWork:
    """A receive whose message comes when the test says so; like gloo's, it is never complete to who does not wait."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.event, self.problem, self.num_waits = Event(), problem, 0

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.num_waits += 1
        assert self.event.wait(timeout=10)
        if self.problem is not None:
            raise self.problem


def test_it_is_complete_when_all_have_come_and_each_is_waited_for_once() -> None:
    works: Any = [FakeWork(), FakeWork()]
    watch = ReceiveWatch(works, device=CPU)
    assert not watch.is_complete()
    works[0].event.set()
    assert not watch.is_complete()
    works[1].event.set()
    watch.wait()
    assert watch.is_complete()
    assert [work.num_waits for work in works] == [1, 1]


def test_a_failure_reaches_who_waits() -> None:
    works: Any = [FakeWork(RuntimeError("Connection closed by peer"))]
    watch = ReceiveWatch(works, device=CPU)
    works[0].event.set()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        watch.wait()
    assert watch.is_complete()


def test_nothing_to_receive_is_there() -> None:
    assert ReceiveWatch([], device=CPU).is_complete()
