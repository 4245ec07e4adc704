"""Runs a rank's lane of a schedule, action by action; decides nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.action_handlers import HANDLERS
from megatron.runtime.activation_store import ActivationStore, size_of
from megatron.runtime.broker import Broker, Link, MessageKey
from megatron.runtime.step import Step, StepResult
from megatron.runtime.step_clock import StepClock
from multimodal.model.unit_stage import UnitStage
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Place

RECEIVE_AHEAD = 8
"""Receives are posted this many actions before the lane gets to them."""


@dataclass
class RunningStep:
    """The state of one step on one rank, as action handlers see it."""

    executor: "Executor"
    step: Step
    is_training: bool
    store: ActivationStore = field(default_factory=ActivationStore)
    loss_sums: list[Tensor] = field(default_factory=list)
    correct: list[tuple[MicrobatchPlace, Tensor]] = field(default_factory=list)

    def stage(self, place: Place) -> UnitStage:
        """The module of a virtual stage of this rank."""
        return self.executor.stages[(place.unit, place.stage)]

    def publish(self, key: MessageKey, tensor: Tensor) -> None:
        """Keep a tensor for whoever consumes it: a send, or an action of these very ranks."""
        self.store.put(key, tensor, size_bytes=size_of(tensor))

    def collect(self, key: MessageKey) -> Tensor:
        """Take a tensor that another action published here, or that a message brings; waits for it."""
        source_ranks, target_ranks = self.executor.ranks_of(key.source), self.executor.ranks_of(key.target)
        if source_ranks == target_ranks:
            tensor: Tensor = self.store.take(key)
            return tensor
        kind = ActionKind.RECEIVE_FORWARD if key.direction == "forward" else ActionKind.RECEIVE_BACKWARD
        with self.executor.clock.span(Action(kind, *key.target, peer=key.source)):
            self.executor.broker.wait(key)
            received = self.executor.broker.complete(key, self.executor.tensor_parallel_group(key.target.unit))
        self.store.grow(-self.store.take(("posted", key)))
        return received

    def post_receive(self, action: Action) -> None:
        """Start a receive action."""
        assert action.peer is not None
        direction = "forward" if action.kind is ActionKind.RECEIVE_FORWARD else "backward"
        key = MessageKey(direction, action.peer, action.place)
        size_bytes = self.executor.broker.post_receive(key, self.link(key))
        self.store.put(("posted", key), size_bytes, size_bytes=0)
        self.store.grow(size_bytes)

    def send(self, action: Action) -> None:
        """Run a send action."""
        assert action.peer is not None
        direction = "forward" if action.kind is ActionKind.SEND_FORWARD else "backward"
        key = MessageKey(direction, action.place, action.peer)
        self.executor.broker.send(key, self.link(key), self.store.take(key))

    def link(self, key: MessageKey) -> Link:
        """Ranks and shape of a message."""
        upstream, downstream = (key.source, key.target) if key.direction == "forward" else (key.target, key.source)
        return Link(
            self.executor.ranks_of(key.source),
            self.executor.ranks_of(key.target),
            self._message_shape(upstream, downstream),
            is_replicated=upstream.unit != downstream.unit,
        )

    def _message_shape(self, upstream: Place, downstream: Place) -> tuple[int, ...]:
        microbatch = MicrobatchPlace(downstream.unit, downstream.replica, downstream.microbatch)
        hidden_size = self.step.graph.unit(downstream.unit).transformer.hidden_size
        if upstream.unit == downstream.unit:
            rows = self.executor.any_stage(upstream.unit).num_rows(self.step.num_tokens_of(microbatch))
            return (rows, 1, hidden_size)
        source = MicrobatchPlace(upstream.unit, upstream.replica, upstream.microbatch)
        (route,) = (route for route in self.step.routes.from_source[source] if route.target == microbatch)
        return (self.step.num_rows_of_route(route), hidden_size)


class Executor:
    """Holds what outlives a step: this rank's stages, the broker, the clock.

    stages: (unit, virtual stage) -> module; groups: unit -> this rank's tensor parallel group there;
    reduce_gradients: called with (unit, virtual stage) for a reduce action.
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        plan: Plan,
        rank: int,
        stages: Mapping[tuple[str, int], UnitStage],
        groups: Mapping[str, dist.ProcessGroup],
        broker: Broker,
        device: torch.device,
        reduce_gradients: Callable[[str, int], None],
    ) -> None:
        self.graph, self.plan, self.rank, self.stages, self.device = graph, plan, rank, stages, device
        self.broker, self.reduce_gradients = broker, reduce_gradients
        self.lane = plan.lane_of_rank[rank]
        self.clock = StepClock(lane=self.lane)
        self.parameter_storages = frozenset(
            parameter.untyped_storage().data_ptr() for stage in stages.values() for parameter in stage.parameters()
        )
        self._groups = groups

    def execute(self, step: Step, *, is_training: bool) -> StepResult:
        """Run this rank's lane of `step.schedule`; gradients accumulate in the stages' parameters."""
        for stage in self.stages.values():
            stage.train(is_training)
        running = RunningStep(self, step, is_training)
        memory_before = _start_counting_cuda_memory()
        self.clock.start_step()
        actions = step.schedule.lanes[self.lane].actions
        receives = [index for index, action in enumerate(actions) if action.kind in _RECEIVES]
        num_posted = 0
        for index, action in enumerate(actions):
            while num_posted < len(receives) and receives[num_posted] <= index + RECEIVE_AHEAD:
                running.post_receive(actions[receives[num_posted]])
                num_posted += 1
            HANDLERS[action.kind](running, action)
        self.broker.finish()
        running.store.check_empty()
        return self._result(running, memory_before)

    def ranks_of(self, place: Place) -> tuple[int, ...]:
        """Ranks of a virtual stage."""
        return self.plan.virtual_stage(place.unit, place.replica, place.stage).ranks

    def any_stage(self, unit: str) -> UnitStage:
        """Some stage of this rank in a unit (they share configuration)."""
        return next(stage for (name, _), stage in self.stages.items() if name == unit)

    def tensor_parallel_group(self, unit: str) -> dist.ProcessGroup:
        """This rank's tensor parallel group in a unit."""
        return self._groups[unit]

    def _result(self, running: RunningStep, memory_before: int) -> StepResult:
        counts = self._groups[self.graph.backbone.name].rank() == 0 if running.loss_sums else False
        num_correct = 0
        correct_samples: dict[int, bool] = {}
        for place, is_correct in running.correct if counts else ():
            flags = is_correct.tolist()
            num_correct += sum(flags)
            for sample_id, flag in zip(running.step.target_samples[place], flags, strict=True):
                correct_samples[sample_id] = correct_samples.get(sample_id, True) and flag
        return StepResult(
            loss_sum=float(torch.stack(running.loss_sums).double().sum()) if counts else 0.0,
            num_correct_tokens=num_correct,
            correct_samples=correct_samples,
            events=self.clock.events(),
            peak_activation_bytes=_cuda_memory_peak() - memory_before if torch.cuda.is_available() else running.store.peak_bytes,
        )


def _start_counting_cuda_memory() -> int:
    """Bytes allocated now; CUDA's allocator knows what autograd keeps, so nothing needs to be counted there."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _cuda_memory_peak() -> int:
    return torch.cuda.max_memory_allocated()


_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
