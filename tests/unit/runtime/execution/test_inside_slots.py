"""Work inside a computation: it runs in the wait that the schedule names, inherits nothing, and is missed if it does not run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from megatron.runtime.execution.lane_run import HANDLERS, LaneRun
from megatron.runtime.execution.step_clock import StepClock, seconds_by_resource
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.model.weight_gradient_queue import DeferWeightGradients, WeightGradientQueue, active_queue
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane
from tests.unit.schedule.schedule_text import lanes_from_text


class FakeBroker:
    def finish(self) -> None:
        pass


class FakeRun(LaneRun):
    """Notes what runs; computations of the LLM come to `num_waits` waits."""

    link = reduce_gradients = None  # type: ignore[assignment]

    def __init__(self, num_waits: int) -> None:
        super().__init__(broker=FakeBroker(), clock=StepClock(lane=0))  # type: ignore[arg-type]
        self.num_of_llm, self.waits, self.log = num_waits, TensorParallelWaits(), list[str]()
        self.graphs: list[torch.Tensor] = []

    def _filled(self) -> AbstractContextManager[None]:
        return self.waits.filled_by(self.fill_wait, go_on=self.end_wait)

    def forward(self, action: Action) -> None:
        with self.clock.span(action), self._filled() if action.unit == "llm" else nullcontext():
            self.log.append(f"{action.unit} begins")
            for _ in range(self.num_of_llm if action.unit == "llm" else 0):
                with self.waits.filled():
                    self.log.append("waited")
            if action.unit == "vision":
                assert active_queue() is None and torch.is_grad_enabled()
                with self.waits.filled():  # of whatever runs inside, nobody is told
                    pass
                self.held_back.append(lambda: self.log.append("collective of vision"))
                self.graphs.append(torch.ones(2, requires_grad=True).square())

    backward = forward


def run(text: str, *, num_waits: int) -> FakeRun:
    lane: Lane = lanes_from_text(text)[0]
    running = FakeRun(num_waits)
    running.run(lane)
    return running


def test_work_runs_in_the_waits_that_it_names_and_its_collectives_behind_them() -> None:
    found = run("lane 0: {F vision/0/0/0 @1; F vision/0/0/1 @1; F vision/0/0/2 @0} F llm/0/0/0; F llm/0/0/1", num_waits=3)
    first = ["llm begins", "vision begins", "waited", "collective of vision"]
    second = [*["vision begins"] * 2, "waited", *["collective of vision"] * 2]
    assert found.log == [*first, *second, "waited", "llm begins", *["waited"] * 3]


def test_every_kind_of_action_has_a_handler() -> None:
    assert set(HANDLERS) == set(ActionKind)


@pytest.mark.parametrize(
    ("num_waits", "found"), [(2, "has 2 waits for tensor parallel collectives"), (0, "has no wait that can be filled")]
)
def test_work_that_no_wait_comes_for_is_missed(num_waits: int, found: str) -> None:
    with pytest.raises(ScheduleError, match=rf"^F vision/0/0/1: was to run in wait 2 .* inside F llm/0/0/0, which {found}; let"):
        run("lane 0: {F vision/0/0/0 @3; F vision/0/0/1 @2} F llm/0/0/0", num_waits=num_waits)


def test_work_inherits_neither_grad_mode_nor_queue_nor_hooks_of_its_carrier() -> None:
    saved: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor)
    running = FakeRun(1)
    running.inside = {0: [Action(ActionKind.FORWARD, "vision", 0, 0, 0)]}
    with hooks, torch.no_grad(), DeferWeightGradients(WeightGradientQueue()):
        running.forward(Action(ActionKind.FORWARD, "llm", 0, 0, 0))
        assert not torch.is_grad_enabled() and active_queue() is not None
    assert not saved and running.graphs[0].requires_grad


def test_time_inside_a_computation_counts_once() -> None:
    running = run("lane 0: {F vision/0/0/0 @0} F llm/0/0/0", num_waits=1)
    inside, carrier = running.clock.events()
    assert carrier.start_seconds <= inside.start_seconds <= inside.end_seconds <= carrier.end_seconds
    assert seconds_by_resource((inside, carrier))["compute"] == carrier.end_seconds - carrier.start_seconds
