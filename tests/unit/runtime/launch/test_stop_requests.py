"""How runs end early: by signals, time limits, or the rank that failed first."""

import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.runtime.launch.failure import Ending, InterruptedRunError, report, tell_launcher
from megatron.runtime.launch.stop_requests import StopReason, StopRequests
from multimodal.values.errors import ConfigError


class RecordedEnding(Ending):
    """Remembers what would have ended the process."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[InterruptedRunError] = []

    def fail(self, problem: BaseException) -> None:  # type: ignore[override]
        assert isinstance(problem, InterruptedRunError)
        self.problems.append(problem)


@pytest.mark.parametrize(
    ("is_training", "signals", "ends", "reason"),
    [
        (False, {0: signal.SIGTERM}, ("ended by SIGTERM before training", 143), StopReason.NONE),
        (True, {}, None, StopReason.NONE),
        (True, {0: signal.SIGTERM, 1: signal.SIGTERM}, None, StopReason.SIGTERM),  # the same, from srun and from torchrun
        (True, {0: signal.SIGTERM, 60: signal.SIGTERM}, ("ended by SIGTERM while training", 143), StopReason.SIGTERM),
        (True, {0: signal.SIGINT}, ("ended by SIGINT while training", 130), StopReason.NONE),
    ],
)
def test_what_signals_end_and_what_they_ask_for(
    is_training: bool,
    signals: dict[int, signal.Signals],
    ends: tuple[str, int] | None,
    reason: StopReason,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """signals: by the second in which they come; ends: what ends the process at once, and its exit code."""
    ending, now = RecordedEnding(), time.monotonic()
    requests = StopRequests(ending)
    if is_training:
        requests.begin_training()
    for second, number in signals.items():
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        requests.take(number)
    assert [(str(problem), problem.exit_code) for problem in ending.problems] == ([ends] if ends else [])
    assert requests.reason(exit_duration_minutes=None) is reason


def test_a_time_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, now = StopRequests(RecordedEnding()), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 119.0)
    assert requests.reason(exit_duration_minutes=2) is StopReason.NONE
    monkeypatch.setattr(time, "monotonic", lambda: now + 121.0)
    assert requests.reason(exit_duration_minutes=2) is StopReason.DURATION


def test_torchrun_ends_with_the_message_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        if rank == 1:
            report(ConfigError("--lr is missing"), rank)
        else:
            tell_launcher("ended because another rank failed", seconds_later=1)
    failures = {rank: ProcessFailure(rank, 7, 2, str(tmp_path / f"{rank}.json")) for rank in (0, 1)}
    before, _, behind = str(ChildFailedError("pretrain_mllm.py", failures)).partition("Root Cause")
    assert "traceback : ended because another rank failed" in before
    assert behind.strip("=\n").endswith("traceback : ConfigError: --lr is missing")
    assert capsys.readouterr().err == "pretrain_mllm.py: error: --lr is missing [ConfigError, rank 1]\n"
