"""What the executor does for each kind of action."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.runtime.activation_store import SavedTensors, size_of
from megatron.runtime.broker import MessageKey
from megatron.runtime.step_inputs import move_input
from multimodal.model.language_head import HeadOutput
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.backward_need import has_trainable_output, stage_backward_need
from multimodal.values.schedule import Action, ActionKind, Place

if TYPE_CHECKING:
    from megatron.runtime.executor import RunningStep


@dataclass(frozen=True)
class _OpenMicrobatch:
    """What a backward needs of its forward."""

    output: Tensor | GradientEdge | None
    """The loss itself; of any other output only the edge into the graph, so that the tensor can be freed.

    None where this microbatch depends on nothing that is trained: text without items in a frozen LLM.
    """
    output_shape: torch.Size
    hidden: Tensor | None
    items: tuple[tuple[Route, Tensor], ...]


def _forward(run: "RunningStep", action: Action) -> None:
    need = stage_backward_need(run.step.graph, run.executor.plan, action.unit, action.replica, action.stage)
    has_backward = run.is_training and need.has_backward
    hidden, items = _collect_inputs(run, action)
    for route, tensor in items:
        tensor.requires_grad_(has_backward and has_trainable_output(run.step.graph, route.source.unit))
    if hidden is not None:
        hidden.requires_grad_(has_backward and need.sends_gradient)
    embeddings = torch.cat([tensor for _, tensor in items]) if items else None
    batch = move_input(run.step.inputs[_microbatch(action.place)], run.executor.device)
    counts_memory = has_backward and run.executor.device.type == "cpu"
    saved = SavedTensors(run.executor.parameter_storages) if counts_memory else None
    with run.executor.clock.span(action), torch.set_grad_enabled(has_backward), saved or nullcontext():
        output = run.stage(action.place)(hidden, batch, embeddings)
        if isinstance(output, HeadOutput):
            tensor = _record_loss(run, action, output)
        else:
            tensor = output
            _publish_output(run, action, tensor.detach())
    if has_backward:
        edge = None if not tensor.requires_grad else tensor if isinstance(output, HeadOutput) else get_gradient_edge(tensor)
        size_bytes = (saved.size_bytes if saved else 0) + size_of(hidden)
        run.store.put(action.place, _OpenMicrobatch(edge, tensor.shape, hidden, items), size_bytes=size_bytes)


def _backward(run: "RunningStep", action: Action) -> None:
    opened: _OpenMicrobatch = run.store.take(action.place)
    gradient = _collect_output_gradient(run, action, opened.output_shape)
    with run.executor.clock.span(action):
        if opened.output is not None:
            torch.autograd.backward((opened.output,), (gradient,))  # type: ignore[arg-type]
    if opened.hidden is not None and opened.hidden.requires_grad:
        before = action.place._replace(stage=action.stage - 1)
        run.publish(MessageKey("backward", action.place, before), _gradient_of(opened.hidden))
    for route, tensor in opened.items:
        if tensor.requires_grad:
            run.publish(MessageKey("backward", action.place, _last_place(run, route.source)), _gradient_of(tensor))


def _collect_inputs(run: "RunningStep", action: Action) -> tuple[Tensor | None, tuple[tuple[Route, Tensor], ...]]:
    place = action.place
    if action.stage > 0:
        return run.collect(MessageKey("forward", place._replace(stage=action.stage - 1), place)), ()
    routes = run.step.routes.to_target.get(_microbatch(place), ())
    return None, tuple((route, run.collect(MessageKey("forward", _last_place(run, route.source), place))) for route in routes)


def _record_loss(run: "RunningStep", action: Action, output: HeadOutput) -> Tensor:
    run.loss_sums.append(output.loss_sum.detach())
    if output.is_correct is not None:
        run.correct.append((_microbatch(action.place), output.is_correct))
    return output.loss_sum / run.step.num_target_tokens


def _publish_output(run: "RunningStep", action: Action, output: Tensor) -> None:
    place = action.place
    if not run.stage(place).is_last:
        run.publish(MessageKey("forward", place, place._replace(stage=action.stage + 1)), output)
        return
    for route in run.step.routes.from_source.get(_microbatch(place), ()):
        rows = run.step.source_rows(route).to(output.device)
        target = Place(route.target.unit, route.target.replica, 0, route.target.microbatch)
        run.publish(MessageKey("forward", place, target), output.index_select(0, rows))


def _collect_output_gradient(run: "RunningStep", action: Action, shape: torch.Size) -> Tensor | None:
    place = action.place
    if not run.stage(place).is_last:
        return run.collect(MessageKey("backward", place._replace(stage=action.stage + 1), place))
    if action.unit == run.step.graph.backbone.name:
        return None
    gradient: Tensor | None = None
    for route in run.step.routes.from_source.get(_microbatch(place), ()):
        source = Place(route.target.unit, route.target.replica, 0, route.target.microbatch)
        part = run.collect(MessageKey("backward", source, place))
        gradient = part.new_zeros(shape) if gradient is None else gradient
        gradient.index_add_(0, run.step.source_rows(route).to(part.device), part)
    assert gradient is not None, f"{place} feeds nobody"
    return gradient


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _microbatch(place: Place) -> MicrobatchPlace:
    return MicrobatchPlace(place.unit, place.replica, place.microbatch)


def _last_place(run: "RunningStep", source: MicrobatchPlace) -> Place:
    last = run.executor.plan.units[source.unit].num_virtual_stages - 1
    return Place(source.unit, source.replica, last, source.microbatch)


def _send(run: "RunningStep", action: Action) -> None:
    with run.executor.clock.span(action):
        run.send(action)


def _receive(run: "RunningStep", action: Action) -> None:
    """Posted ahead by the executor; whoever consumes it waits for it."""


def _reduce_gradients(run: "RunningStep", action: Action) -> None:
    with run.executor.clock.span(action):
        run.executor.reduce_gradients(action.unit, action.stage)


HANDLERS: Mapping[ActionKind, Callable[["RunningStep", Action], None]] = {
    ActionKind.FORWARD: _forward,
    ActionKind.BACKWARD: _backward,
    ActionKind.SEND_FORWARD: _send,
    ActionKind.RECEIVE_FORWARD: _receive,
    ActionKind.SEND_BACKWARD: _send,
    ActionKind.RECEIVE_BACKWARD: _receive,
    ActionKind.REDUCE_GRADIENTS: _reduce_gradients,
}
