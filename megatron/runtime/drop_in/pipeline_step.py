"""One rank's step of a pipeline's schedule, computed by the loop's own forward step and model chunks."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.communication.broker import Broker, Link
from megatron.runtime.communication.message_channel import MessageChannel, Wait
from megatron.runtime.drop_in.modules_on_ranks import LoopInputs, acting_as
from megatron.runtime.drop_in.pipeline_schedule import PipelineShape
from megatron.runtime.drop_in.split_backward import find_overlapped, prepare_split, without_overlap
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.step_clock import StepClock
from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_weight_gradients
from multimodal.plan.communicators import BETWEEN_UNITS, Track, track_of
from multimodal.values.action import Action, ActionKind, MessageKey, Place
from multimodal.values.errors import ConfigError
from multimodal.values.schedule import Entry, Schedule


class GradientSync:
    """Holds the reduction of gradients back until a chunk's last backward, as Megatron's own schedules do.

    Without grad_sync_func, a chunk's last backward reduces gradients as it computes them. With it, reductions are launched where
    the schedule says, except for the first stage of a pipeline that is not interleaved, which has no bubble after its last
    backward. The schedule says where, too, if no backward computes a chunk's last gradients alone (split, or of several modules).
    """

    def __init__(self, config: Any, *, chunks: Sequence[torch.nn.Module], is_late: bool = False) -> None:
        """config: ModelParallelConfig whose two functions may be None, one for all chunks, or a list with one per chunk."""
        no_sync = config.no_sync_func
        self._make_contexts: list[Callable[[], Any]] = no_sync if isinstance(no_sync, list) else [no_sync] if no_sync else []
        launch = config.grad_sync_func
        self._launch: list[Callable[..., None] | None] = launch if isinstance(launch, list) else [launch] * len(chunks)
        if is_late:
            self._launch = [given or _overlapped_sync(chunk) for given, chunk in zip(self._launch, chunks, strict=True)]
        self._chunks = chunks
        self._held = ExitStack()
        self._is_launched = [False] * len(chunks)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold reductions back for the duration of a step, except those that `last_backward` and `launch` allow."""
        self._hold()
        try:
            yield
        finally:
            self._held.close()

    @contextmanager
    def last_backward(self, chunk_index: int, *, is_first_stage: bool) -> Iterator[None]:
        """Surround the last backward of a chunk."""
        has_bubble_after = not is_first_stage or len(self._chunks) > 1
        if self._launch[chunk_index] is not None and has_bubble_after:
            yield
            return
        self._is_launched[chunk_index] = True
        self._held.close()
        try:
            yield
        finally:
            self._hold()

    def launch(self, chunk_index: int) -> None:
        """Start reducing a chunk's gradients, unless its last backward did."""
        function = self._launch[chunk_index]
        if function is None or self._is_launched[chunk_index]:
            return
        self._is_launched[chunk_index] = True
        self._held.close()
        function(self._chunks[chunk_index].parameters())
        self._hold()

    def _hold(self) -> None:
        for make_context in self._make_contexts:
            self._held.enter_context(make_context())


def _overlapped_sync(chunk: Any) -> Callable[..., None] | None:
    """Return what starts the reduction of a chunk that begins it in backwards; None: the loop's finalizing reduces."""
    config = getattr(chunk, "ddp_config", None)
    function = getattr(chunk, "start_grad_sync", None)
    return function if config is None or config.overlap_grad_reduce else None


NUM_DIMENSIONS = 3
"""Dimensions of activations: sequence, microbatch, hidden."""
PARITIES = (BETWEEN_UNITS, 0, 1)
BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
_backward_of_modules: Callable[..., Any] | None = getattr(schedules, "backward_step_multimodule", None)
"""None before megatron-core 0.17, whose loops have no modules on ranks of their own."""
SHAPE_TRACKS = tuple(Track("shape", parity) for parity in PARITIES)
"""Tracks of shapes, which follow each other as the activations do."""


class ShapeTellingBroker(Broker):
    """A broker that posts receives of activations, in the order of the sends, as their shapes arrive; gradients have these."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shapes: dict[MessageKey, tuple[int, ...]] = {}
        """Shapes of gradients to come, by message."""
        self._told: dict[MessageKey, tuple[Tensor, Link, Sequence[Wait]]] = {}

    def send(self, key: MessageKey, link: Link, payload: Tensor) -> None:
        """Start sending a tensor; an activation's shape goes first."""
        if key.direction == "forward":
            assert self._channel is not None
            self._shapes[MessageKey("backward", key.target, key.source)] = tuple(payload.shape)
            told = torch.tensor((*payload.shape, *[-1] * (NUM_DIMENSIONS - payload.dim())), device=self._device)
            self._channel.start(_shape_track(key), sends=[(told, rank) for rank in _told_by(link, self._rank)])
        super().send(key, replace(link, shape=tuple(payload.shape)), payload)

    def post_receive(self, key: MessageKey, link: Link) -> int:
        """Start receiving a gradient, or an activation's shape."""
        if key.direction == "backward":
            return super().post_receive(key, replace(link, shape=self._shapes.pop(key)))
        assert self._channel is not None
        told = torch.empty(NUM_DIMENSIONS, dtype=torch.int64, device=self._device)
        teller = next(rank for rank in link.source_ranks if self._rank in _told_by(link, rank))
        self._told[key] = told, link, self._channel.start(_shape_track(key), receives=[(told, teller)])
        return 0

    def wait(self, key: MessageKey) -> Tensor:
        """Wait for a tensor, an activation's shape first."""
        if key in self._told:
            way = _shape_track(key), self._told[key][1].source_ranks
            before = [each for each, (_, link, _) in self._told.items() if (_shape_track(each), link.source_ranks) == way]
            for each in before[: before.index(key) + 1]:
                told, link, waits = self._told.pop(each)
                for wait in waits:
                    wait()
                super().post_receive(each, replace(link, shape=tuple(size for size in told.tolist() if size >= 0)))
        return super().wait(key)


def _shape_track(key: MessageKey) -> Track:
    return Track("shape", track_of(key.direction, key.source, key.target).parity)


def _told_by(link: Link, source: int) -> Sequence[int]:
    """Return the target's ranks that a rank of the source tells the shape."""
    return link.target_ranks[link.source_ranks.index(source) :: len(link.source_ranks)]


class _OpenMicrobatch(NamedTuple):
    """A forward's tensors that its backward needs; inputs by the module that they come from."""

    inputs: dict[str, Tensor]
    sizes: dict[str, list[int]]
    """Along the batch's dimension, of the parts that replicas of the module sent."""
    output: Any
    queue: WeightGradientQueue | None


class PipelineStep(LaneRun):
    """One step of one rank, computed by the loop's own forward step and model chunks."""

    def __init__(
        self,
        inputs: LoopInputs,
        *,
        channel: MessageChannel | None,
        message_shapes: tuple[tuple[int, ...], tuple[int, ...]],
        shape: PipelineShape,
        schedule: Schedule,
    ) -> None:
        """channel: None with one stage; message_shapes: of received and sent activations (sequence, microbatch, hidden)."""
        dtype = inputs.config.pipeline_dtype or torch.float32
        make_broker = ShapeTellingBroker if inputs.config.variable_seq_lengths else Broker
        broker = make_broker(rank=dist.get_rank(), channel=channel, device=platform.device(), dtype=dtype)
        super().__init__(broker=broker, clock=StepClock(lane=0))
        self.inputs, self.message_shapes, self.shape, self.plan = inputs, message_shapes, shape, schedule.shape.plan
        self.lane = schedule.entries(self.plan.lane_of_rank[dist.get_rank()])
        self.modules = {module.name: module for module in shape.modules}
        actions = [entry.action for entry in self.lane]
        is_shared = len({action.unit for action in actions}) > 1
        self.forward_data: list[Any] = []
        """The loss function's reports, per microbatch; empty except on the last virtual stage."""
        self.num_tokens = torch.zeros([], dtype=torch.int, device=platform.device())
        has_halves = any(action.kind is ActionKind.INPUT_GRADIENT for action in actions)
        self.is_split = has_halves or getattr(inputs.config, "delay_wgrad_compute", False)
        self.is_late = self.is_split or is_shared
        """True if no backward computes a chunk's last gradients alone."""
        self.overlapped = find_overlapped(inputs.chunks) if self.is_late else []
        if self.is_split:
            for chunk in inputs.chunks:
                prepare_split(chunk, inputs.config, is_encoder=not shape.llm.is_here)
        self.gradient_sync = GradientSync(inputs.config, chunks=inputs.chunks, is_late=self.is_late)
        forwards = [action for action in actions if action.kind is ActionKind.FORWARD]
        self.ungathered = list(dict.fromkeys(map(self._chunk_index, forwards)))
        """Chunks for which param_sync_func was not called, in the order of their first forwards."""
        self.started: set[int] = set()
        self._gather_next()
        num_keeping = inputs.config.num_microbatches_with_partial_activation_checkpoints if shape.has_messages else None
        opened = ((each.kind is ActionKind.FORWARD) - (each.kind in BACKWARDS) for each in actions)
        num_in_flight = max(accumulate(opened), default=1)
        self.recomputed = {
            action: None if num_keeping is None else index % num_in_flight >= num_keeping for index, action in enumerate(forwards)
        }
        """Forward -> True if all its layers recompute their activations; None: as configured.

        Of microbatches in flight, the first (Megatron's num_microbatches_with_partial_activation_checkpoints) keep theirs.
        """
        self.last_of_chunk = {(action.kind, self._chunk_index(action)): action for action in actions}

    def execute(self) -> None:
        """Run the lane; gradients accumulate where the model keeps them."""
        with nullcontext() if self.shape.forward_only else self.gradient_sync.holding():
            self.run(self.lane)

    def forward(self, entry: Entry) -> None:
        """Run the loop's forward step of a microbatch."""
        inputs, action, place, chunk_index = self.inputs, entry.action, entry.action.place, self._chunk_index(entry.action)
        parts_of: dict[str, list[Tensor]] = {}
        for key in entry.takes:
            parts_of.setdefault(key.source.unit, []).append(self.collect(key))
        sizes = {name: [part.shape[inputs.batch_dimension(name)] for part in each] for name, each in parts_of.items()}
        received = {name: self._join(each, name).requires_grad_() for name, each in parts_of.items()}
        if chunk_index not in self.started:
            self.started.add(chunk_index)
            self._gather_next()
        queue = WeightGradientQueue() if self.is_split and not self.shape.forward_only else None
        role: AbstractContextManager[None] = nullcontext()
        if inputs.takes_roles:
            is_last = place.stage == self._num_stages(place) - 1
            role = acting_as(inputs.chunks[chunk_index], place.unit, is_first=place.stage == 0, is_last=is_last)
        with self.clock.span(action), defer_weight_gradients(queue), role:
            output, num_tokens = schedules.forward_step(
                inputs.forward_step_func,
                inputs.module_iterators.get(place.unit, inputs.data_iterators[chunk_index]),
                inputs.chunks[chunk_index],
                self.shape.num_microbatches,
                received if inputs.is_by_module else next(iter(received.values()), None),
                self.forward_data,
                inputs.config,
                cp_group_size=inputs.context_parallel_size,
                collect_non_loss_data=inputs.collect_non_loss_data,
                checkpoint_activations_microbatch=self.recomputed[action],
                is_first_microbatch=schedules.check_first_val_step(
                    inputs.first_val_step, self.shape.forward_only, action.microbatch == 0
                ),
                current_microbatch=action.microbatch,
                vp_stage=chunk_index if self.modules[place.unit].num_chunks > 1 else None,
                is_last_stage=self._is_last_stage(action),
            )
        self.num_tokens += num_tokens
        if not self._is_last_stage(action):
            sent, num_parts = self._checked_output(output, place.unit), len(entry.gives)
            parts = [sent] if inputs.split is None or num_parts == 1 else inputs.split(sent, place.unit, num_parts)
            for key, part in zip(entry.gives, parts, strict=True):
                self.publish(key, part.detach())
        if not self.shape.forward_only:
            self.store.put(("open", place), _OpenMicrobatch(received, sizes, output, queue), size_bytes=0)
            if not self._is_last_stage(action):
                schedules.deallocate_output_tensor(output, inputs.config.deallocate_pipeline_outputs)

    def backward(self, entry: Entry) -> None:
        """Run megatron-core's backward step of a microbatch; a chunk's last one may reduce its gradients."""
        queue = self._propagate(entry)
        if queue is not None:
            with without_overlap(self.overlapped):
                queue.compute()

    def input_gradient(self, entry: Entry) -> None:
        """Run the same; linear layers leave their weight gradients to a queue."""
        self.store.put(("weight gradients", entry.action.place), self._propagate(entry), size_bytes=0)

    def weight_gradient(self, entry: Entry) -> None:
        """Compute the weight gradients that an input gradient left."""
        queue: WeightGradientQueue = self.store.take(("weight gradients", entry.action.place))
        with self.clock.span(entry.action), without_overlap(self.overlapped):
            queue.compute()

    def _propagate(self, entry: Entry) -> WeightGradientQueue | None:
        """Run a backward step, and send its inputs' gradients; returns the weight gradients that it left."""
        inputs, action, place, gradient = self.inputs, entry.action, entry.action.place, None
        opened: _OpenMicrobatch = self.store.take(("open", place))
        if not self._is_last_stage(action):
            gradient = self._join([self.collect(key) for key in entry.takes], place.unit)
        sync: AbstractContextManager[None] = nullcontext()
        if self.is_late:
            sync = without_overlap(self.overlapped)
        elif self.last_of_chunk[action.kind, self._chunk_index(action)] == action:
            sync = self.gradient_sync.last_backward(self._chunk_index(action), is_first_stage=not entry.gives)
        with sync, self.clock.span(action):
            if inputs.is_by_module:
                gradients = None if gradient is None else {place.unit: gradient}
                assert _backward_of_modules is not None
                found = _backward_of_modules(opened.inputs, opened.output, gradients, inputs.config, place.unit)
            else:
                takes_type = "model_type" in inspect.signature(schedules.backward_step).parameters  # before megatron-core 0.17
                types = {"model_type": get_model_type(inputs.chunks[0])} if takes_type else {}
                given = next(iter(opened.inputs.values()), None)
                of_input = schedules.backward_step(given, opened.output, gradient, **types, config=inputs.config)
                found = dict.fromkeys(opened.inputs, of_input)
        for name, received in opened.inputs.items():
            # A microbatch without any trained parameters has no gradient, but the stage before waits for one.
            whole = torch.zeros_like(received) if found[name] is None else found[name]
            cut = whole.split(opened.sizes[name], dim=inputs.batch_dimension(name))
            for key, part in zip((each for each in entry.gives if each.target.unit == name), cut, strict=True):
                self.publish(key, part)
        return opened.queue

    def reduce_gradients(self, entry: Entry) -> None:
        """Start the loop's grad_sync_func; the loop's finalizing waits for it."""
        chunk_index = self._chunk_index(entry.action)
        if self.last_of_chunk[entry.action.kind, chunk_index] == entry.action:
            self.gradient_sync.launch(chunk_index)

    def link(self, key: MessageKey) -> Link:
        """Return the ranks and the shape of a message: each rank of a pipeline sends its own data."""
        source, target = (self.plan.virtual_stage(*place[:3]).ranks for place in (key.source, key.target))
        is_like_input = (key.direction == "forward") == (dist.get_rank() in target)
        is_between = key.source.unit != key.target.unit
        return Link(source, target, self.message_shapes[0 if is_like_input else 1], is_replicated=is_between)

    def complete(self, key: MessageKey) -> Tensor:
        """Return the tensor that a message brought; between modules each tensor parallel rank received a share of its rows."""
        is_between = key.source.unit != key.target.unit
        return self.broker.complete(key, self.inputs.tensor_parallel_groups[key.target.unit] if is_between else None)

    def _join(self, parts: Sequence[Tensor], module: str) -> Tensor:
        """Put together what several replicas sent, or took, of a module's output."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=self.inputs.batch_dimension(module))

    def _gather_next(self) -> None:
        """Launch the gathering of a chunk's parameters beside the chunk before it; as in Megatron, in interleaved training."""
        functions, chunks = self.inputs.config.param_sync_func, self.inputs.chunks
        if functions is not None and len(chunks) > 1 and not self.shape.forward_only and self.ungathered:
            index = self.ungathered.pop(0)
            function = functions[index] if isinstance(functions, list) else functions
            function(chunks[index].parameters())

    def _chunk_index(self, action: Action) -> int:
        return action.stage // self.modules[action.unit].num_stages

    def _num_stages(self, place: Place) -> int:
        return self.modules[place.unit].num_stages * self.modules[place.unit].num_chunks

    def _is_last_stage(self, action: Action) -> bool:
        """True if an action's virtual stage computes the loss."""
        return action.unit == self.shape.llm.name and action.stage == self._num_stages(action.place) - 1

    def _checked_output(self, output: Any, module: str) -> Tensor:
        """Check that the next stage can receive the output: a message of another size would hang or crash it."""
        if self.inputs.is_by_module:
            output = output.get(module) if isinstance(output, dict) else output
        shape, dtype = self.message_shapes[1], self.inputs.config.pipeline_dtype
        is_tensor = isinstance(output, Tensor)
        dimensions = (NUM_DIMENSIONS, NUM_DIMENSIONS - 1)[: 1 + self.inputs.is_by_module]
        is_variable = self.inputs.config.variable_seq_lengths or module != self.shape.llm.name
        fits = is_tensor and (output.dim() in dimensions if is_variable else output.numel() == torch.Size(shape).numel())
        if not fits or output.dtype != dtype:
            found = f"{output.dtype} of shape {tuple(output.shape)}" if is_tensor else f"a {type(output).__name__}"
            raise ConfigError(
                f"forward_step_func returned {found}, but the next stage expects {dtype} of shape {shape} (sequence, microbatch, "
                "hidden); correct seq_length, micro_batch_size or the config's pipeline_dtype"
            )
        return output
