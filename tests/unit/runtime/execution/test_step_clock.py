import time

import pytest
import torch

from megatron.runtime.execution.step_clock import StepClock, seconds_by_resource
from multimodal.values.action import Action, ActionKind
from multimodal.values.timeline import TimelineEvent

FORWARD = Action(ActionKind.FORWARD, "llm", 0, 0, 0)
SECOND = FORWARD._replace(microbatch=1)


class Time:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def run(self, clock: StepClock, action: Action, *, seconds: float) -> None:
        with clock.span(action):
            self.seconds += seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Time:
    now = Time()
    monkeypatch.setattr(time, "perf_counter", now)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return now


def test_spans_count_from_the_start_of_the_step(now: Time) -> None:
    clock = StepClock(lane=3)
    clock.start_step()
    now.run(clock, FORWARD, seconds=2.0)
    now.seconds += 1.0
    now.run(clock, SECOND, seconds=4.0)
    assert clock.events() == (TimelineEvent(FORWARD, 3, 0.0, 2.0), TimelineEvent(SECOND, 3, 3.0, 7.0))


def test_a_new_step_forgets_the_last_one(now: Time) -> None:
    clock = StepClock(lane=0)
    clock.start_step()
    now.run(clock, FORWARD, seconds=2.0)
    clock.start_step()
    assert clock.events() == ()
    now.run(clock, SECOND, seconds=1.0)
    assert clock.events() == (TimelineEvent(SECOND, 0, 0.0, 1.0),)


def test_every_kind_of_action_counts_as_compute_communication_or_waiting() -> None:
    expected = {
        ActionKind.FORWARD: "compute",
        ActionKind.BACKWARD: "compute",
        ActionKind.INPUT_GRADIENT: "compute",
        ActionKind.WEIGHT_GRADIENT: "compute",
        ActionKind.SEND_FORWARD: "communication",
        ActionKind.SEND_BACKWARD: "communication",
        ActionKind.GATHER_PARAMETERS: "communication",
        ActionKind.REDUCE_GRADIENTS: "communication",
        ActionKind.RECEIVE_FORWARD: "waiting",
        ActionKind.RECEIVE_BACKWARD: "waiting",
    }
    assert set(expected) == set(ActionKind)
    for kind, resource in expected.items():
        split = seconds_by_resource((TimelineEvent(FORWARD._replace(kind=kind), 0, 1.0, 3.5),))
        assert split == {"compute": 0.0, "communication": 0.0, "waiting": 0.0, resource: 2.5}
