"""Fillers: what runs while a carrier waits for a message, and what after it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.runtime.communication.broker import MessageKey
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_clock import StepClock
from multimodal.values.action import Action, ActionKind, Place, SampleSubset

HERE, THERE = Place("llm", 0, 1, 0), Place("llm", 0, 0, 0)
KEY = MessageKey("forward", THERE, HERE)
FILLERS = [Action(ActionKind.WEIGHT_GRADIENT, "llm", 0, 1, microbatch) for microbatch in range(3)]


class FakeBroker:
    """A message that is there after it was asked for `num_questions` times."""

    def __init__(self, log: list[Any], num_questions: int) -> None:
        self.log, self.num_questions = log, num_questions

    def is_there(self, key: MessageKey) -> bool:
        self.num_questions -= 1
        return self.num_questions < 0

    def wait(self, key: MessageKey) -> None:
        self.log.append("wait")

    def complete(self, key: MessageKey, group: Any) -> torch.Tensor:
        return torch.ones(1)


class FakeStep(RunningStep):
    """Notes the microbatches of weight gradients; collects `other` in the first."""

    log: list[Any]
    other: MessageKey | None = None

    def weight_gradient(self, action: Action) -> None:
        self.log.append(action.microbatch)
        if self.other is not None and action.microbatch == 0:
            self.collect(self.other)


def running_step(log: list[Any], *, num_questions: int) -> FakeStep:
    two_stages = SimpleNamespace(
        units={"llm": SimpleNamespace(context_parallel_size=1)},
        virtual_stage=lambda unit, replica, stage: SimpleNamespace(ranks=(stage,)),
    )
    executor: Any = SimpleNamespace(
        plan=two_stages,
        broker=FakeBroker(log, num_questions),
        clock=StepClock(lane=0),
        tensor_parallel_group=lambda unit: SimpleNamespace(size=lambda: 1),
        stage_group=lambda unit: SimpleNamespace(size=lambda: 1),
        device=torch.device("cpu"),
    )
    step: Any = SimpleNamespace()
    running = FakeStep(executor, step, is_training=True)
    running.log = log
    running.store.put(("posted", KEY), 4, size_bytes=0)
    running.fillers.extend(FILLERS)
    return running


@pytest.mark.parametrize(
    ("num_questions", "expected"),
    [
        (0, ["wait", "carrier", 0, 1, 2]),
        (2, [0, 1, "wait", "carrier", 2]),
        (9, [0, 1, 2, "wait", "carrier"]),
    ],
)
def test_fillers_run_while_the_message_is_not_there_and_the_others_after_the_carrier(
    num_questions: int, expected: list[Any]
) -> None:
    log: list[Any] = []
    running = running_step(log, num_questions=num_questions)
    running.collect(KEY)
    log.append("carrier")
    running.run_fillers()
    assert log == expected


def test_a_filler_that_waits_runs_no_other_filler() -> None:
    log: list[Any] = []
    running = running_step(log, num_questions=1)
    other = KEY._replace(covers=SampleSubset(1))
    running.store.put(("posted", other), 4, size_bytes=0)

    running.other = other
    running.collect(KEY)
    assert log == [0, "wait", "wait"]
    running.run_fillers()
    assert log == [0, "wait", "wait", 1, 2]


def test_what_is_local_is_taken_at_once() -> None:
    log: list[Any] = []
    running = running_step(log, num_questions=9)
    local = MessageKey("backward", HERE, HERE)
    running.publish(local, torch.full((2,), 3.0))
    assert running.collect(local).tolist() == [3.0, 3.0]
    assert log == []


def test_a_collective_is_finished_once_where_it_is_needed() -> None:
    log: list[Any] = []
    running = running_step(log, num_questions=0)
    gather = Action(ActionKind.GATHER_PARAMETERS, "llm", 0, 1)
    running.start_collective(gather, lambda stage: lambda: log.append(stage))
    assert log == []
    running.finish_collective(gather)
    running.finish_collective(gather)
    assert log == [1]
