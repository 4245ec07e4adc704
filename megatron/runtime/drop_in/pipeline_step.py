"""Runs one rank's lane of a pipeline's schedule with the loop's own forward step and model chunks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.drop_in.gradient_sync import GradientSync
from megatron.runtime.drop_in.parameter_sync import ParameterSync
from megatron.runtime.drop_in.pipeline_schedule import PipelineShape
from multimodal.values.errors import ConfigError
from multimodal.values.schedule import Action, ActionKind, Lane, Place

RECEIVE_AHEAD = 8
"""Receives are posted this many actions before the lane gets to them."""


@dataclass(frozen=True)
class LoopInputs:
    """What the training loop gave."""

    forward_step_func: Callable[..., Any]
    chunks: Sequence[torch.nn.Module]
    data_iterators: Sequence[Any]
    """One per chunk."""
    config: Any
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_parallel_size: int


@dataclass(frozen=True)
class PipelineMessages:
    """How this rank's messages look and where they go."""

    channel: MessageChannel | None
    """None: there is one stage."""
    ranks: tuple[int, ...]
    """Global ranks of the pipeline, by stage."""
    receive_shape: tuple[int, ...]
    """Of activations received and of the gradients returned for them: (sequence, microbatch, hidden)."""
    send_shape: tuple[int, ...]
    """Of activations sent and of the gradients received for them."""
    dtype: torch.dtype | None


class _OpenMicrobatch(NamedTuple):
    """What a backward needs of its forward."""

    input: Tensor | None
    output: Tensor


class PipelineStep:
    """The state of one step on one rank."""

    def __init__(self, inputs: LoopInputs, *, messages: PipelineMessages, shape: PipelineShape, lane: Lane) -> None:
        self.inputs, self.messages, self.shape, self.lane = inputs, messages, shape, lane
        self.forward_data: list[Any] = []
        """What the loss function reports, per microbatch; empty but on the last virtual stage."""
        self.num_tokens = torch.zeros([], dtype=torch.int, device=platform.device())
        self.gradient_sync = GradientSync(inputs.config, chunks=inputs.chunks)
        forwards = [action for action in lane.actions if action.kind is ActionKind.FORWARD]
        self.parameter_sync = ParameterSync(
            inputs.config,
            chunks=inputs.chunks,
            forward_order=[self.chunk_index(action) for action in forwards],
            forward_only=shape.forward_only,
        )
        num_keeping = inputs.config.num_microbatches_with_partial_activation_checkpoints if shape.num_stages > 1 else None
        self.checkpoints = dict(zip(forwards, _checkpointed_forwards(lane, num_keeping=num_keeping), strict=True))
        self.last_backwards = {action.stage: action for action in lane.actions if action.kind is ActionKind.BACKWARD}
        self.open: dict[Place, _OpenMicrobatch] = {}
        self.to_send: dict[tuple[ActionKind, Place], Tensor] = {}
        self.posted: dict[tuple[ActionKind, Place], tuple[dist.Work, Tensor]] = {}

    def run(self) -> None:
        """Execute the lane; gradients accumulate where the model keeps them."""
        receives = [index for index, action in enumerate(self.lane.actions) if action.kind in _RECEIVES]
        num_posted = 0
        with nullcontext() if self.shape.forward_only else self.gradient_sync.holding():
            for index, action in enumerate(self.lane.actions):
                while num_posted < len(receives) and receives[num_posted] <= index + RECEIVE_AHEAD:
                    self._post(self.lane.actions[receives[num_posted]])
                    num_posted += 1
                HANDLERS[action.kind](self, action)
        if self.messages.channel is not None:
            self.messages.channel.finish_sends()

    def chunk_index(self, action: Action) -> int:
        """Which of this rank's chunks an action belongs to."""
        return action.stage // self.shape.num_stages

    def is_last_stage(self, action: Action) -> bool:
        """Whether an action's virtual stage computes the loss."""
        return action.stage == self.shape.num_virtual_stages - 1

    def receive(self, kind: ActionKind, place: Place) -> Tensor:
        """Wait for what a posted receive brings."""
        work, buffer = self.posted.pop((kind, place))
        work.wait()
        return buffer

    def send(self, action: Action) -> None:
        """Start sending what was computed for it."""
        self._channel().send(self.to_send.pop((action.kind, action.place)), target=self._peer_rank(action))

    def _post(self, action: Action) -> None:
        is_forward = action.kind is ActionKind.RECEIVE_FORWARD
        shape = self.messages.receive_shape if is_forward else self.messages.send_shape
        buffer = torch.empty(shape, dtype=self.messages.dtype, device=platform.device())
        work = self._channel().post_receive(buffer, source=self._peer_rank(action))
        self.posted[action.kind, action.place] = work, buffer

    def _channel(self) -> MessageChannel:
        assert self.messages.channel is not None, "one stage sends no messages"
        return self.messages.channel

    def _peer_rank(self, action: Action) -> int:
        assert action.peer is not None
        return self.messages.ranks[action.peer.stage % self.shape.num_stages]


def _checkpointed_forwards(lane: Lane, *, num_keeping: int | None) -> list[bool | None]:
    """Tell of each forward of a lane whether all its layers recompute their activations; None: as the layers are configured.

    Of the microbatches that are in flight at once, the first `num_keeping` (Megatron's
    num_microbatches_with_partial_activation_checkpoints) keep theirs.
    """
    kinds = [action.kind for action in lane.actions]
    num_forwards = kinds.count(ActionKind.FORWARD)
    if num_keeping is None:
        return [None] * num_forwards
    num_in_flight = max(accumulate((kind is ActionKind.FORWARD) - (kind is ActionKind.BACKWARD) for kind in kinds))
    return [index % num_in_flight >= num_keeping for index in range(num_forwards)]


def _forward(step: PipelineStep, action: Action) -> None:
    inputs, chunk_index, is_last_stage = step.inputs, step.chunk_index(action), step.is_last_stage(action)
    received = None
    if action.stage > 0:
        received = step.receive(ActionKind.RECEIVE_FORWARD, action.place).requires_grad_()
    step.parameter_sync.before_forward(chunk_index)
    output, num_tokens = schedules.forward_step(
        inputs.forward_step_func,
        inputs.data_iterators[chunk_index],
        inputs.chunks[chunk_index],
        step.shape.num_microbatches,
        received,
        step.forward_data,
        inputs.config,
        cp_group_size=inputs.context_parallel_size,
        collect_non_loss_data=inputs.collect_non_loss_data,
        checkpoint_activations_microbatch=step.checkpoints[action],
        is_first_microbatch=schedules.check_first_val_step(
            inputs.first_val_step, step.shape.forward_only, action.microbatch == 0
        ),
        current_microbatch=action.microbatch,
        vp_stage=chunk_index if step.shape.num_chunks > 1 else None,
        is_last_stage=is_last_stage,
    )
    step.num_tokens += num_tokens
    if not is_last_stage:
        step.to_send[ActionKind.SEND_FORWARD, action.place] = _checked_output(step, output).detach()
    if not step.shape.forward_only:
        step.open[action.place] = _OpenMicrobatch(received, output)
        if not is_last_stage:
            schedules.deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)


def _checked_output(step: PipelineStep, output: Any) -> Tensor:
    """Check that the next stage can receive this: a message of another size would hang or crash it."""
    shape, dtype = step.messages.send_shape, step.messages.dtype
    is_tensor = isinstance(output, Tensor)
    if not is_tensor or output.numel() != torch.Size(shape).numel() or output.dtype != dtype:
        found = f"{output.dtype} of shape {tuple(output.shape)}" if is_tensor else f"a {type(output).__name__}"
        raise ConfigError(
            f"forward_step_func returned {found}, but the next stage expects {dtype} of shape {shape} (sequence, microbatch, "
            "hidden); correct seq_length, micro_batch_size or the config's pipeline_dtype"
        )
    tensor: Tensor = output
    return tensor


def _backward(step: PipelineStep, action: Action) -> None:
    opened = step.open.pop(action.place)
    gradient = None if step.is_last_stage(action) else step.receive(ActionKind.RECEIVE_BACKWARD, action.place)
    is_last = step.last_backwards[action.stage] == action
    sync = step.gradient_sync.last_backward(step.chunk_index(action), is_first_stage=action.stage == 0)
    with sync if is_last else nullcontext():
        input_gradient = _backward_step(
            input_tensor=opened.input,
            output_tensor=opened.output,
            output_tensor_grad=gradient,
            model_type=get_model_type(step.inputs.chunks[0]),
            config=step.inputs.config,
        )
    if opened.input is not None:
        # A microbatch that nothing trained has touched has no gradient, but the stage before waits for one.
        sent = torch.zeros_like(opened.input) if input_gradient is None else input_gradient
        step.to_send[ActionKind.SEND_BACKWARD, action.place] = sent


def _backward_step(**arguments: Any) -> Tensor | None:
    """Call megatron-core's backward step, which has dropped `model_type` in later versions."""
    known = inspect.signature(schedules.backward_step).parameters
    gradient: Tensor | None = schedules.backward_step(**{name: value for name, value in arguments.items() if name in known})
    return gradient


def _send(step: PipelineStep, action: Action) -> None:
    step.send(action)


def _receive(step: PipelineStep, action: Action) -> None:
    """Posted ahead; whoever consumes it waits for it."""


def _reduce_gradients(step: PipelineStep, action: Action) -> None:
    step.gradient_sync.launch(step.chunk_index(action))


HANDLERS: Mapping[ActionKind, Callable[[PipelineStep, Action], None]] = {
    ActionKind.FORWARD: _forward,
    ActionKind.BACKWARD: _backward,
    ActionKind.SEND_FORWARD: _send,
    ActionKind.RECEIVE_FORWARD: _receive,
    ActionKind.SEND_BACKWARD: _send,
    ActionKind.RECEIVE_BACKWARD: _receive,
    ActionKind.REDUCE_GRADIENTS: _reduce_gradients,
}
"""What the drop-in does for each kind of action; schedules with other kinds are refused."""

_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
