"""What flows into and out of a computation: activations forward, gradients back, wherever the other end runs."""

import torch
from torch import Tensor

from megatron.runtime.communication.broker import MessageKey
from megatron.runtime.execution.running_step import RunningStep, microbatch_of
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.schedule import Action, Place


def collect_inputs(run: RunningStep, action: Action) -> tuple[Tensor | None, tuple[tuple[Route, Tensor], ...]]:
    """What a forward needs: hidden states of the stage before, or upstream outputs by route at a unit's first stage."""
    place = action.place
    if action.stage > 0:
        return run.collect(MessageKey("forward", place._replace(stage=action.stage - 1), place)), ()
    routes = run.step.routes.to_target.get(microbatch_of(place), ())
    return None, tuple((route, run.collect(MessageKey("forward", last_place(run, route.source), place))) for route in routes)


def publish_outputs(run: RunningStep, action: Action, outputs: list[Tensor]) -> None:
    """Hand on a forward's outputs (one per sample subset): to the next stage in one piece, or to each consumer what it needs."""
    place = action.place
    if not run.stage(place).is_last:
        whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        run.publish(MessageKey("forward", place, place._replace(stage=action.stage + 1)), whole)
        return
    for route in run.step.routes.from_source.get(microbatch_of(place), ()):
        output = outputs[run.step.part_of(route)]
        rows = run.output_rows(route).to(output.device)
        run.publish(MessageKey("forward", place, _first_place(route.target)), output.index_select(0, rows))


def collect_output_gradient(run: RunningStep, action: Action, shape: torch.Size) -> Tensor:
    """The gradient of what a forward handed on (of one sample subset: `action.part`)."""
    place = action.place
    if not run.stage(place).is_last:
        return run.collect(MessageKey("backward", place._replace(stage=action.stage + 1), place, action.part))
    gradient: Tensor | None = None
    for route in run.step.routes.from_source.get(microbatch_of(place), ()):
        if action.part not in (-1, run.step.part_of(route)):
            continue
        found = run.collect(MessageKey("backward", _first_place(route.target), place))
        gradient = found.new_zeros(shape) if gradient is None else gradient
        gradient.index_add_(0, run.output_rows(route).to(found.device), found)
    assert gradient is not None, f"{place} feeds nobody"
    return gradient


def publish_input_gradients(
    run: RunningStep, action: Action, hidden: Tensor | None, items: tuple[tuple[Route, Tensor], ...]
) -> None:
    """Hand back the gradients of what a forward collected."""
    if hidden is not None and hidden.requires_grad:
        before = action.place._replace(stage=action.stage - 1)
        run.publish(MessageKey("backward", action.place, before, action.part), _gradient_of(hidden))
    for route, tensor in items:
        if tensor.requires_grad:
            run.publish(MessageKey("backward", action.place, last_place(run, route.source)), _gradient_of(tensor))


def last_place(run: RunningStep, source: MicrobatchPlace) -> Place:
    """A microbatch in its unit's last stage."""
    last = run.executor.plan.units[source.unit].num_virtual_stages - 1
    return Place(source.unit, source.replica, last, source.microbatch)


def _first_place(target: MicrobatchPlace) -> Place:
    return Place(target.unit, target.replica, 0, target.microbatch)


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
