"""When a run is asked to stop, and when it ends at once."""

import signal
import time

import pytest

from megatron.runtime.launch.failure import Ending, InterruptedRunError
from megatron.runtime.launch.stop_requests import StopReason, StopRequests


class RecordedEnding(Ending):
    """Remembers what would have ended the process."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[InterruptedRunError] = []

    def fail(self, problem: BaseException) -> None:  # type: ignore[override]
        assert isinstance(problem, InterruptedRunError)
        self.problems.append(problem)


@pytest.fixture
def ending() -> RecordedEnding:
    """Of a process that goes on."""
    return RecordedEnding()


def test_sigterm_before_training_ends_at_once(ending: RecordedEnding) -> None:
    StopRequests(ending).take(signal.SIGTERM)
    assert [(str(problem), problem.exit_code) for problem in ending.problems] == [("ended by SIGTERM before training", 143)]


def test_sigterm_while_training_asks_to_stop(ending: RecordedEnding) -> None:
    requests = StopRequests(ending)
    requests.begin_training()
    assert requests.reason(exit_duration_minutes=None) is StopReason.NONE
    requests.take(signal.SIGTERM)
    requests.take(signal.SIGTERM)  # the same, from srun and from torchrun
    assert requests.reason(exit_duration_minutes=None) is StopReason.SIGTERM
    assert not ending.problems


def test_a_later_sigterm_ends_at_once(ending: RecordedEnding, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests(ending)
    requests.begin_training()
    requests.take(signal.SIGTERM)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60.0)
    requests.take(signal.SIGTERM)
    assert [problem.exit_code for problem in ending.problems] == [143]


def test_ctrl_c_always_ends_at_once(ending: RecordedEnding) -> None:
    requests = StopRequests(ending)
    requests.begin_training()
    requests.take(signal.SIGINT)
    assert [(str(problem), problem.exit_code) for problem in ending.problems] == [("ended by SIGINT while training", 130)]


def test_a_time_limit_is_reached(ending: RecordedEnding, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, now = StopRequests(ending), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 119.0)
    assert requests.reason(exit_duration_minutes=2) is StopReason.NONE
    monkeypatch.setattr(time, "monotonic", lambda: now + 121.0)
    assert requests.reason(exit_duration_minutes=2) is StopReason.DURATION
