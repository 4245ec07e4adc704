"""What an encoder's copy does when every stage of the LLM has one: another replica's work, for nothing."""

from contextlib import nullcontext

import torch
from torch.autograd.graph import get_gradient_edge

from megatron.runtime.execution.activation_store import SavedTensors
from megatron.runtime.execution.forward_action import move_input
from megatron.runtime.execution.running_step import RunningStep, microbatch_of
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.schedule import Action, ActionKind


def repeat_forward(run: RunningStep, action: Action) -> None:
    """Encode what another replica encodes, too, and drop the result; keep what the backward needs where there is one."""
    need = stage_backward_need(run.step.graph, run.executor.plan, action.unit, action.replica, action.stage)
    has_backward = run.is_training and need.has_backward
    run.finish_collective(Action(ActionKind.GATHER_PARAMETERS, *action.place[:3]))
    batch = move_input(run.step.inputs[microbatch_of(action.work)], run.executor.device)
    counts_memory = has_backward and run.executor.device.type == "cpu"
    saved = SavedTensors(run.executor.parameter_storages) if counts_memory else None
    measured = run.executor.clock.span(action)
    with measured, run.gathering_weights(action), torch.set_grad_enabled(has_backward), saved or nullcontext():
        output = run.stage(action.place)(None, batch, None)
    if has_backward:
        kept = get_gradient_edge(output), output.shape, output.dtype
        run.store.put(("repeated", action.place, action.work), kept, size_bytes=saved.size_bytes if saved else 0)


def repeat_backward(run: RunningStep, action: Action) -> None:
    """The backward of what nobody took: it begins with zero, so it adds nothing to any gradient."""
    output, shape, dtype = run.store.take(("repeated", action.place, action.work))
    with run.executor.clock.span(action), run.gathering_weights(action):
        torch.autograd.backward((output,), (torch.zeros(shape, dtype=dtype, device=run.executor.device),))
