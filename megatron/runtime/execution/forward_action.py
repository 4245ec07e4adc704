"""The forward of one microbatch through one stage, sample subset by sample subset where its backward is cut."""

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.runtime.execution.activation_store import SavedTensors, size_of
from megatron.runtime.execution.message_flow import collect_inputs, publish_outputs
from megatron.runtime.execution.running_step import RunningStep, microbatch_of
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.weight_gradient_queue import DeferWeightGradients, WeightGradientQueue
from multimodal.values.assignment import Route
from multimodal.values.backward_need import has_trainable_output, stage_backward_need
from multimodal.values.schedule import Action, ActionKind


@dataclass(frozen=True)
class OpenSubset:
    """What a backward needs of its forward."""

    loss: Tensor | None
    """None where the stage gives none, or where it depends on nothing that is trained: text without items in a frozen LLM."""
    output: GradientEdge | None
    """Of what the stage hands on only the edge into the graph, so that the tensor can be freed; None as above."""
    output_shape: torch.Size | None
    """None where the stage hands nothing on."""
    hidden: Tensor | None
    items: tuple[tuple[Route, Tensor], ...]
    queue: WeightGradientQueue | None
    """Where the backward leaves weight gradients; None where it is not split."""


def run_forward(run: RunningStep, action: Action) -> None:
    """Collect what the stage needs, run it, hand on what it gives, and keep what the backwards need."""
    need = stage_backward_need(run.step.graph, run.executor.plan, action.unit, action.replica, action.stage)
    has_backward = run.is_training and need.has_backward
    hidden, items = collect_inputs(run, action)
    run.finish_collective(Action(ActionKind.GATHER_PARAMETERS, *action.place[:3]))
    for route, tensor in items:
        tensor.requires_grad_(has_backward and has_trainable_output(run.step.graph, route.source.unit))
    batches = [move_input(batch, run.executor.device) for batch in run.step.inputs_of(microbatch_of(action.place))]
    hiddens = _split_rows(run, action, hidden, batches)
    with run.executor.clock.span(action), torch.set_grad_enabled(has_backward):
        outputs = []
        for part, batch, rows in zip(run.step.form.parts(microbatch_of(action.place)), batches, hiddens, strict=True):
            if rows is not None:
                rows.requires_grad_(has_backward and need.sends_gradient)
            outputs.append(_run_subset(run, action._replace(part=part), batch, rows, items, has_backward=has_backward))
        if all(output is not None for output in outputs):
            publish_outputs(run, action, [output for output in outputs if output is not None])


def move_input(packed: PackedInput, device: torch.device) -> PackedInput:
    """The same input with its tensors on `device`."""
    if device.type == "cpu":
        return packed
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    return replace(packed, **moved)


def _run_subset(
    run: RunningStep,
    action: Action,
    batch: PackedInput,
    hidden: Tensor | None,
    items: tuple[tuple[Route, Tensor], ...],
    *,
    has_backward: bool,
) -> Tensor | None:
    """Run one sample subset; returns what the stage hands on, or None when it gives a loss alone."""
    embeddings = torch.cat([tensor for _, tensor in items]) if items else None
    counts_memory = has_backward and run.executor.device.type == "cpu"
    saved = SavedTensors(run.executor.parameter_storages) if counts_memory else None
    queue = WeightGradientQueue() if has_backward and action.place in run.step.form.split else None
    with run.gathering_weights(action), saved or nullcontext(), DeferWeightGradients(queue):
        output = run.stage(action.place)(hidden, batch, embeddings)
        loss = _record_loss(run, action, output) if isinstance(output, HeadOutput) else None
        given = output.conditions if isinstance(output, HeadOutput) else output
    if has_backward:
        for tensor in (hidden, *(tensor for _, tensor in items if action.part <= 0)):
            if saved is not None and tensor is not None:
                saved.add(tensor)
        size_bytes = saved.size_bytes if saved is not None else size_of(hidden)
        opened = OpenSubset(
            loss=loss if loss is not None and loss.requires_grad else None,
            output=get_gradient_edge(given) if given is not None and given.requires_grad else None,
            output_shape=None if given is None else given.shape,
            hidden=hidden,
            items=items,
            queue=queue,
        )
        run.store.put(("open", action.place, action.part), opened, size_bytes=size_bytes)
    return None if given is None else given.detach()


def _split_rows(run: RunningStep, action: Action, hidden: Tensor | None, batches: list[PackedInput]) -> list[Tensor | None]:
    """Each sample subset's hidden states, as leaves of graphs of their own."""
    if hidden is None or len(batches) == 1:
        return [hidden] * len(batches)
    sizes = [run.stage(action.place).num_rows(batch.num_tokens) for batch in batches]
    return [rows.detach() for rows in hidden.split(sizes)]


def _record_loss(run: RunningStep, action: Action, output: HeadOutput) -> Tensor:
    """The microbatch's share of the global loss: LLM tokens and a generator's values count by their own global numbers."""
    run.loss_sums.setdefault(action.unit, []).append(output.loss_sum.detach())
    if output.is_correct is not None:
        run.correct.append((microbatch_of(action.place), output.is_correct))
    if action.unit == run.step.graph.backbone.name:
        return output.loss_sum / run.step.num_target_tokens
    return output.loss_sum / run.step.num_generated_values[action.unit]
