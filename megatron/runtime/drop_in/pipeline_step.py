"""One rank's step of a pipeline's schedule, computed by the loop's own forward step and model chunks."""

import inspect
from collections.abc import Callable, Sequence
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
from megatron.runtime.communication.broker import Broker, Link, MessageKey
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.drop_in.pipeline_schedule import PipelineShape
from megatron.runtime.drop_in.sync_functions import GradientSync
from megatron.runtime.drop_in.told_shapes import NUM_DIMENSIONS, ShapeTellingBroker
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.step_clock import StepClock
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import ConfigError
from multimodal.values.schedule import Lane


@dataclass(frozen=True)
class LoopInputs:
    """The arguments of the training loop."""

    forward_step_func: Callable[..., Any]
    chunks: Sequence[torch.nn.Module]
    data_iterators: Sequence[Any]
    """Data iterators, one per chunk."""
    config: Any
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_parallel_size: int


class _OpenMicrobatch(NamedTuple):
    """A forward's tensors that its backward needs."""

    input: Tensor | None
    output: Tensor


class PipelineStep(LaneRun):
    """One step of one rank, computed by the loop's own forward step and model chunks."""

    def __init__(
        self,
        inputs: LoopInputs,
        *,
        channel: MessageChannel | None,
        ranks: tuple[int, ...],
        message_shapes: tuple[tuple[int, ...], tuple[int, ...]],
        shape: PipelineShape,
        lane: Lane,
    ) -> None:
        """channel: None if there is one stage; ranks: global ranks of the pipeline, by stage.

        message_shapes: of activations that are received, and of those that are sent (sequence, microbatch, hidden); gradients
        have the shapes of their activations.
        """
        dtype = inputs.config.pipeline_dtype or torch.float32
        make_broker = ShapeTellingBroker if inputs.config.variable_seq_lengths else Broker
        broker = make_broker(rank=dist.get_rank(), channel=channel, device=platform.device(), dtype=dtype)
        super().__init__(broker=broker, clock=StepClock(lane=0))
        self.inputs, self.ranks, self.message_shapes, self.shape, self.lane = inputs, ranks, message_shapes, shape, lane
        self.forward_data: list[Any] = []
        """The loss function's reports, per microbatch; empty except on the last virtual stage."""
        self.num_tokens = torch.zeros([], dtype=torch.int, device=platform.device())
        self.gradient_sync = GradientSync(inputs.config, chunks=inputs.chunks)
        forwards = [action for action in lane.actions if action.kind is ActionKind.FORWARD]
        self.ungathered = list(dict.fromkeys(map(self._chunk_index, forwards)))
        """Chunks for which param_sync_func was not called, in the order of their first forwards."""
        self.started: set[int] = set()
        self._gather_next()
        num_keeping = inputs.config.num_microbatches_with_partial_activation_checkpoints if shape.num_stages > 1 else None
        self.checkpoints = dict(zip(forwards, _checkpointed_forwards(lane, num_keeping=num_keeping), strict=True))
        self.last_backwards = {action.stage: action for action in lane.actions if action.kind is ActionKind.BACKWARD}

    def execute(self) -> None:
        """Run the lane; gradients accumulate where the model keeps them."""
        with nullcontext() if self.shape.forward_only else self.gradient_sync.holding():
            self.run(self.lane)

    def forward(self, action: Action) -> None:
        """Run the loop's forward step of a microbatch."""
        inputs, chunk_index, place = self.inputs, self._chunk_index(action), action.place
        received = None
        if action.stage > 0:
            received = self.collect(MessageKey("forward", place._replace(stage=action.stage - 1), place)).requires_grad_()
        if chunk_index not in self.started:
            self.started.add(chunk_index)
            self._gather_next()
        with self.clock.span(action):
            output, num_tokens = schedules.forward_step(
                inputs.forward_step_func,
                inputs.data_iterators[chunk_index],
                inputs.chunks[chunk_index],
                self.shape.num_microbatches,
                received,
                self.forward_data,
                inputs.config,
                cp_group_size=inputs.context_parallel_size,
                collect_non_loss_data=inputs.collect_non_loss_data,
                checkpoint_activations_microbatch=self.checkpoints[action],
                is_first_microbatch=schedules.check_first_val_step(
                    inputs.first_val_step, self.shape.forward_only, action.microbatch == 0
                ),
                current_microbatch=action.microbatch,
                vp_stage=chunk_index if self.shape.num_chunks > 1 else None,
                is_last_stage=self._is_last_stage(action),
            )
        self.num_tokens += num_tokens
        if not self._is_last_stage(action):
            following = place._replace(stage=action.stage + 1)
            self.publish(MessageKey("forward", place, following), self._checked_output(output).detach())
        if not self.shape.forward_only:
            self.store.put(("open", place), _OpenMicrobatch(received, output), size_bytes=0)
            if not self._is_last_stage(action):
                schedules.deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)

    def backward(self, action: Action) -> None:
        """Run megatron-core's backward step of a microbatch; a chunk's last one may reduce its gradients."""
        place, gradient = action.place, None
        opened: _OpenMicrobatch = self.store.take(("open", place))
        if not self._is_last_stage(action):
            gradient = self.collect(MessageKey("backward", place._replace(stage=action.stage + 1), place))
        is_last = self.last_backwards[action.stage] == action
        sync = self.gradient_sync.last_backward(self._chunk_index(action), is_first_stage=action.stage == 0)
        with sync if is_last else nullcontext(), self.clock.span(action):
            input_gradient = _backward_step(
                input_tensor=opened.input,
                output_tensor=opened.output,
                output_tensor_grad=gradient,
                model_type=get_model_type(self.inputs.chunks[0]),
                config=self.inputs.config,
            )
        if opened.input is not None:
            # A microbatch without any trained parameters has no gradient, but the stage before waits for one.
            sent = torch.zeros_like(opened.input) if input_gradient is None else input_gradient
            self.publish(MessageKey("backward", place, place._replace(stage=action.stage - 1)), sent)

    def reduce_gradients(self, action: Action) -> None:
        """Start the loop's grad_sync_func; the loop's finalizing waits for it."""
        self.gradient_sync.launch(self._chunk_index(action))

    def link(self, key: MessageKey) -> Link:
        """Return the ranks and the shape of a message: each rank of a pipeline sends its own data."""
        source, target = (self.ranks[place.stage % self.shape.num_stages] for place in (key.source, key.target))
        is_like_input = (key.direction == "forward") == (target == dist.get_rank())
        return Link((source,), (target,), self.message_shapes[0 if is_like_input else 1], is_replicated=False)

    def _gather_next(self) -> None:
        """Launch the gathering of a chunk's parameters, while the chunk before it in the lane starts.

        As in Megatron, only interleaved training steps call param_sync_func; otherwise the model's own hooks gather parameters.
        """
        functions, chunks = self.inputs.config.param_sync_func, self.inputs.chunks
        if functions is not None and len(chunks) > 1 and not self.shape.forward_only and self.ungathered:
            index = self.ungathered.pop(0)
            function = functions[index] if isinstance(functions, list) else functions
            function(chunks[index].parameters())

    def _chunk_index(self, action: Action) -> int:
        """Return the index of the action's chunk on this rank."""
        return action.stage // self.shape.num_stages

    def _is_last_stage(self, action: Action) -> bool:
        """True if an action's virtual stage computes the loss."""
        return action.stage == self.shape.num_virtual_stages - 1

    def _checked_output(self, output: Any) -> Tensor:
        """Check that the next stage can receive the output: a message of another size would hang or crash it."""
        shape, dtype = self.message_shapes[1], self.inputs.config.pipeline_dtype
        is_tensor = isinstance(output, Tensor)
        is_variable = self.inputs.config.variable_seq_lengths
        fits = is_tensor and (output.dim() == NUM_DIMENSIONS if is_variable else output.numel() == torch.Size(shape).numel())
        if not fits or output.dtype != dtype:
            found = f"{output.dtype} of shape {tuple(output.shape)}" if is_tensor else f"a {type(output).__name__}"
            raise ConfigError(
                f"forward_step_func returned {found}, but the next stage expects {dtype} of shape {shape} (sequence, microbatch, "
                "hidden); correct seq_length, micro_batch_size or the config's pipeline_dtype"
            )
        return output


def _checkpointed_forwards(lane: Lane, *, num_keeping: int | None) -> list[bool | None]:
    """Return, for each forward of a lane, True if all its layers recompute their activations; None: as configured.

    Of the microbatches that are in flight at once, the first `num_keeping` (Megatron's
    num_microbatches_with_partial_activation_checkpoints) keep theirs.
    """
    kinds = [action.kind for action in lane.actions]
    num_forwards = kinds.count(ActionKind.FORWARD)
    if num_keeping is None:
        return [None] * num_forwards
    num_in_flight = max(accumulate((kind is ActionKind.FORWARD) - (kind is ActionKind.BACKWARD) for kind in kinds))
    return [index % num_in_flight >= num_keeping for index in range(num_forwards)]


def _backward_step(**arguments: Any) -> Tensor | None:
    """Call megatron-core's backward step, whose later versions do not have `model_type`."""
    known = inspect.signature(schedules.backward_step).parameters
    return schedules.backward_step(**{name: value for name, value in arguments.items() if name in known})
