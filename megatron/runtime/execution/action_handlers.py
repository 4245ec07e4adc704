"""What the executor does for each kind of action."""

from collections.abc import Callable, Mapping

import torch

from megatron.runtime.execution.forward_action import OpenSubset, run_forward
from megatron.runtime.execution.message_flow import collect_output_gradient, publish_input_gradients
from megatron.runtime.execution.running_step import RunningStep
from multimodal.model.weight_gradient_queue import WeightGradientQueue
from multimodal.values.schedule import Action, ActionKind


def _backward(run: RunningStep, action: Action) -> None:
    _propagate(run, action)


def _input_gradient(run: RunningStep, action: Action) -> None:
    """The same backward, in which linear layers left their weight gradients to the queue that was active in the forward."""
    queue = _propagate(run, action)
    assert queue is not None, f"the forward of {action} did not know that its backward is split"
    if run.trains_weights(action):
        run.store.put(("weight gradients", action.place, action.part), queue, size_bytes=queue.size_bytes)


def _weight_gradient(run: RunningStep, action: Action) -> None:
    queue: WeightGradientQueue = run.store.take(("weight gradients", action.place, action.part))
    with run.executor.clock.span(action), run.gathering_weights(action):
        queue.compute()


def _propagate(run: RunningStep, action: Action) -> WeightGradientQueue | None:
    """From a stage's loss and the gradient of its output to that of its input; weight gradients on the way."""
    opened: OpenSubset = run.store.take(("open", action.place, action.part))
    gradient = None if opened.output_shape is None else collect_output_gradient(run, action, opened.output_shape)
    roots = [(root, each) for root, each in ((opened.loss, None), (opened.output, gradient)) if root is not None]
    with run.executor.clock.span(action), run.gathering_weights(action):
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))  # type: ignore[arg-type]
    publish_input_gradients(run, action, opened.hidden, opened.items)
    return opened.queue


def _send(run: RunningStep, action: Action) -> None:
    with run.executor.clock.span(action):
        run.send(action)


def _receive(run: RunningStep, action: Action) -> None:
    """Posted ahead by the executor; whoever consumes it waits for it."""


def _gather_parameters(run: RunningStep, action: Action) -> None:
    run.start_collective(action, run.executor.gradients[action.unit].start_gathering)


def _reduce_gradients(run: RunningStep, action: Action) -> None:
    """A whole reduction or, after the backward that did the other layers, the last part of one; before it, get ready for that."""
    unit = run.executor.gradients[action.unit]
    run.start_collective(action, unit.expect_last_backward if action.part == 0 else unit.start_reduction)


HANDLERS: Mapping[ActionKind, Callable[[RunningStep, Action], None]] = {
    ActionKind.FORWARD: run_forward,
    ActionKind.BACKWARD: _backward,
    ActionKind.INPUT_GRADIENT: _input_gradient,
    ActionKind.WEIGHT_GRADIENT: _weight_gradient,
    ActionKind.SEND_FORWARD: _send,
    ActionKind.RECEIVE_FORWARD: _receive,
    ActionKind.SEND_BACKWARD: _send,
    ActionKind.RECEIVE_BACKWARD: _receive,
    ActionKind.GATHER_PARAMETERS: _gather_parameters,
    ActionKind.REDUCE_GRADIENTS: _reduce_gradients,
}
