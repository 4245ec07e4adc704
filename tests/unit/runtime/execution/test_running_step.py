"""Messages that are collected, and collectives that are finished."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron.runtime.communication.broker import MessageKey
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_clock import StepClock
from multimodal.values.action import Action, ActionKind, Place

HERE, THERE = Place("llm", 0, 1, 0), Place("llm", 0, 0, 0)
KEY = MessageKey("forward", THERE, HERE)


class FakeBroker:
    """Notes when a message is waited for."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def wait(self, key: MessageKey) -> None:
        self.log.append("wait")

    def complete(self, key: MessageKey, group: Any) -> torch.Tensor:
        return torch.ones(1)


def running_step(log: list[Any]) -> RunningStep:
    executor: Any = SimpleNamespace(
        broker=FakeBroker(log),
        clock=StepClock(lane=0),
        groups={"llm": SimpleNamespace(tp=None)},
        device=torch.device("cpu"),
        rank=1,
    )
    step: Any = SimpleNamespace()
    running = RunningStep(executor, step)
    running.store.put(("posted", KEY), 4, size_bytes=0)
    return running


def test_a_message_is_waited_for_where_it_is_collected() -> None:
    log: list[Any] = []
    running = running_step(log)
    running.collect(KEY)
    assert log == ["wait"]


def test_what_is_local_is_taken_at_once() -> None:
    log: list[Any] = []
    running = running_step(log)
    local = MessageKey("backward", HERE, HERE)
    running.publish(local, torch.full((2,), 3.0))
    assert running.collect(local).tolist() == [3.0, 3.0]
    assert log == []


def test_a_collective_is_finished_once_where_it_is_needed() -> None:
    log: list[Any] = []
    running = running_step(log)
    gather = Action(ActionKind.GATHER_PARAMETERS, "llm", 0, 1)
    running.start_collective(gather, lambda stage: lambda: log.append(stage))
    assert log == []
    running.finish_collective(gather)
    running.finish_collective(gather)
    assert log == [1]
