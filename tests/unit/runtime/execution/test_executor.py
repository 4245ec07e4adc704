"""What layers cannot run, messages of a running step, what it stores, the clock of its actions, and work inside a computation."""

import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.runtime.execution.activation_store import ActivationStore, SavedTensors
from megatron.runtime.execution.executor import Executor
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.step_clock import StepClock, seconds_by_resource
from multimodal.model.collectives import TensorParallelWaits
from multimodal.model.weight_gradient_queue import WeightGradientQueue, active_queue, defer_weight_gradients
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.parts.cuts import UNCUT, Cuts
from multimodal.values.schedule import Entry
from multimodal.values.timeline import TimelineEvent
from tests.unit.golden_answers import Kinds, golden_test

SPLIT = Cuts(split=frozenset({Place("llm", 0, 0, 0)}))


def check(document: dict[str, Any]) -> None:
    """Check a step against layers of an implementation; it splits a backward, or runs work inside waits, or shares weights."""
    num_parts = document["num_parts"]
    options = SimpleNamespace(transformer_impl=document["impl"], num_overlapped_parts=num_parts, delays_weight_gradients=False)
    stages = {("llm", 0): SimpleNamespace(options=options)}
    executor: Any = SimpleNamespace(stages=stages, sharded=stages if document["is_sharded"] else {})
    schedule = SimpleNamespace(has_inside=document["has_inside"])
    step: Any = SimpleNamespace(cuts=SPLIT if document["is_split"] else UNCUT, schedule=schedule)
    Executor._check_implementation(executor, step)


STEP = {"impl": "local", "is_split": False, "has_inside": False, "num_parts": 1, "is_sharded": False}
STEPS: Kinds = {"step": (STEP, check)}
test_what_layers_cannot_run_is_refused = golden_test("steps.txt", STEPS)


def test_an_entry_is_taken_once_and_then_freed() -> None:
    class Value:
        pass

    store, value = ActivationStore(), Value()
    reference = weakref.ref(value)
    store.put("a", value, size_bytes=0)
    del value
    assert store.take("a") is reference()
    gc.collect()
    assert reference() is None
    with pytest.raises(KeyError):
        store.take("a")


def test_saved_tensors_are_freed_with_the_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    with SavedTensors(frozenset()):
        output = (weight * 2).exp()
    reference = weakref.ref(output)
    del output
    assert reference() is None, "the graph is held by a reference cycle"


FORWARD = Action(ActionKind.FORWARD, "llm", 0, 0, 0)
SECOND = FORWARD._replace(microbatch=1)


class Time:
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


@pytest.mark.parametrize(
    ("kind", "part"), [("F", "compute"), ("SF", "communication"), ("RG", "communication"), ("RF", "waiting")]
)
def test_an_action_counts_as_compute_communication_or_waiting(kind: str, part: str) -> None:
    split = seconds_by_resource((TimelineEvent(FORWARD._replace(kind=ActionKind(kind)), 0, 1.0, 3.5),))
    assert split == {"compute": 0.0, "communication": 0.0, "waiting": 0.0, part: 2.5}


class FilledRun(LaneRun):
    """Computations of the LLM come to one wait; what runs in it notes the context that it has."""

    link = reduce_gradients = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(broker=None, clock=StepClock(lane=0))  # type: ignore[arg-type]
        self.waits, self.graphs = TensorParallelWaits(), list[torch.Tensor]()

    def forward(self, entry: Entry) -> None:
        if entry.action.unit == "llm":
            with self.waits.filled_by(self.fill_wait, go_on=self.end_wait), self.waits.filled():
                pass
        else:
            assert active_queue() is None and torch.is_grad_enabled()
            self.graphs.append(torch.ones(2, requires_grad=True).square())

    backward = forward


def test_work_inherits_neither_grad_mode_nor_queue_nor_hooks_of_its_carrier() -> None:
    saved: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor)
    running = FilledRun()
    running.inside = {0: [Entry(FORWARD._replace(unit="vision"))]}
    with hooks, torch.no_grad(), defer_weight_gradients(WeightGradientQueue()):
        running.forward(Entry(FORWARD))
        assert not torch.is_grad_enabled() and active_queue() is not None
    assert not saved and running.graphs[0].requires_grad
