"""The run of one lane: one loop over its actions and one set of handlers, for any kind of stage."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.runtime.communication.broker import Broker, Link
from megatron.runtime.execution.activation_store import ActivationStore, size_of
from megatron.runtime.execution.step_clock import StepClock
from multimodal.attention.context_parallel import detached
from multimodal.model.weight_gradient_queue import defer_weight_gradients
from multimodal.values.action import Action, ActionKind, MessageKey, Resource, action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Entry, SlotMode


class LaneRun(ABC):
    """One step of one rank; `RunningStep` computes by Braid's own stages, the drop-in's `PipelineStep` by a loop's model."""

    def __init__(self, *, broker: Broker, clock: StepClock) -> None:
        self.broker, self.clock = broker, clock
        self.store = ActivationStore()
        self.collectives: dict[Action, Callable[[], None]] = {}
        """Action -> function that waits for its collective, which is called when that is needed, or at the step's end."""
        self.inside: dict[int, list[Entry]] = {}
        """Pieces to run inside the next computation in line, by the number of the wait that they fill."""
        self.num_waits = 0
        """Waits for tensor parallel collectives in the last computation that had work inside."""
        self.is_filling = False
        """True while work runs in a wait of another computation, its carrier."""
        self.held_back: list[Callable[[], None]] = []
        """Collectives of work inside a wait, which start when that wait is over."""

    def run(self, lane: Sequence[Entry]) -> None:
        """Run the actions of a lane in order."""
        for index, entry in enumerate(lane):
            self.before_action(index)
            if entry.mode is SlotMode.INSIDE:
                self.inside.setdefault(entry.wait, []).append(entry)
                continue
            self.num_waits = 0
            self.handle(entry)
            is_carrier = entry.action.kind.resource is Resource.COMPUTE and entry.mode is SlotMode.IN_LINE
            if self.inside and is_carrier:
                wait, (missed, *_) = min(self.inside.items())
                found = (
                    f"{self.num_waits} waits for tensor parallel collectives" if self.num_waits else "no wait that can be filled"
                )
                raise ScheduleError(
                    f"{action_to_text(missed.action)}: was to run in wait {wait} (counted from 0) inside "
                    f"{action_to_text(entry.action)}, which has {found}; let it run in another one, or between computations"
                )
        self.before_action(len(lane))
        for action in tuple(self.collectives):
            self.finish_collective(action)
        self.broker.finish()
        self.store.check_empty()

    def handle(self, entry: Entry) -> None:
        """Run an action by the method that has the name of its kind."""
        getattr(self, entry.action.kind.name.lower())(entry)

    @abstractmethod
    def forward(self, entry: Entry) -> None:
        """Run a microbatch's forward: collect its inputs, compute, publish its outputs, and keep what the backward needs."""

    @abstractmethod
    def backward(self, entry: Entry) -> None:
        """Run a microbatch's backward: collect its output's gradient, compute, and publish its inputs' gradients."""

    def refuse(self, entry: Entry) -> None:
        """Run a kind of action that not all subclasses have: a split backward's halves, and gathering parameters."""
        raise AssertionError(f"{entry.action} should have been refused")

    input_gradient = weight_gradient = gather_parameters = refuse

    @abstractmethod
    def reduce_gradients(self, entry: Entry) -> None:
        """Start reducing a stage's gradients."""

    @abstractmethod
    def link(self, key: MessageKey) -> Link:
        """Return the ranks and the shape of a message."""

    def before_action(self, position: int) -> None:
        """Called before each action of the lane, and after the last one."""
        return

    def publish(self, key: MessageKey, tensor: Tensor) -> None:
        """Keep a tensor for its consumer: a send, or an action of the same ranks."""
        self.store.put(key, tensor, size_bytes=size_of(tensor))

    def collect(self, key: MessageKey) -> Tensor:
        """Take a tensor that another action published here, or that a message brings; waits for it."""
        if key in self.store:  # a tensor that travels has left the store with its send
            return self.store.take(key)
        kind = ActionKind.RECEIVE_FORWARD if key.direction == "forward" else ActionKind.RECEIVE_BACKWARD
        with self.clock.span(Action(kind, *key.target, peer=key.source, covers=key.covers)):
            self.broker.wait(key)
            received = self.complete(key)
        self.store.take(("posted", key))
        return received

    def complete(self, key: MessageKey) -> Tensor:
        """Return the tensor that a message brought."""
        return self.broker.complete(key)

    def post_receive(self, entry: Entry) -> None:
        """Start a receive action; the consumer of the message waits for it."""
        (key,) = entry.gives
        self.store.put(("posted", key), None, size_bytes=self.broker.post_receive(key, self.link(key)))  # memory of the broker

    receive_forward = receive_backward = post_receive

    def send(self, entry: Entry) -> None:
        """Run a send action."""
        (key,) = entry.takes
        with self.clock.span(entry.action):
            self.broker.send(key, self.link(key), self.store.take(key))

    send_forward = send_backward = send

    def fill_wait(self, number: int) -> None:
        """Run the work that fills a wait of the running computation; it must not inherit any of its context."""
        self.num_waits = number + 1
        for entry in self.inside.pop(number, ()):
            self.is_filling = True
            with torch.enable_grad(), defer_weight_gradients(None), saved_tensors_hooks(detached, lambda tensor: tensor):
                self.handle(entry)
            self.is_filling = False

    def end_wait(self) -> None:
        """Start the collectives of the work in a wait, now that the wait is over and the links are free."""
        for start in self.held_back:
            start()
        self.held_back.clear()

    def finish_collective(self, action: Action) -> None:
        """Wait for a collective action, if it is under way; its event is the time for which the lane waited."""
        if action in self.collectives:
            with self.clock.span(action):
                self.collectives.pop(action)()
