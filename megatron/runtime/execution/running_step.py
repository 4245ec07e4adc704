"""The state of one step on one rank, as action handlers see it."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.communication.broker import Link, MessageKey
from megatron.runtime.execution.activation_store import ActivationStore, size_of
from megatron.runtime.execution.rank_resources import RankResources
from megatron.runtime.step.step import Step
from multimodal.model.unit_stage import UnitStage
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import Role
from multimodal.values.schedule import Action, ActionKind, Place


@dataclass
class RunningStep:
    """What is stored, posted, started and put off."""

    executor: RankResources
    step: Step
    is_training: bool
    run_action: Callable[["RunningStep", Action], None]
    """The handler of any action."""
    store: ActivationStore = field(default_factory=ActivationStore)
    loss_sums: dict[str, list[Tensor]] = field(default_factory=dict)
    """Of every unit with a loss, microbatch by microbatch."""
    correct: list[tuple[MicrobatchPlace, Tensor]] = field(default_factory=list)
    fillers: deque[Action] = field(default_factory=deque)
    """Fillers of the next carrier that have not run yet."""
    collectives: dict[Action, Callable[[], None]] = field(default_factory=dict)
    """What is started and not finished."""
    _is_filling: bool = False

    def stage(self, place: Place) -> UnitStage:
        """The module of a virtual stage of this rank."""
        return self.executor.stages[(place.unit, place.stage)]

    def gathering_weights(self, action: Action) -> AbstractContextManager[None]:
        """What gathers weights and reduces gradients while an action computes, where the stage's weights are sharded."""
        sharded = self.executor.sharded.get((action.unit, action.stage))
        return nullcontext() if sharded is None else sharded.collectives(action.kind)

    def trains_weights(self, action: Action) -> bool:
        """Whether the stage of an action has weight gradients."""
        return stage_backward_need(self.step.graph, self.executor.plan, action.unit, action.replica, action.stage).trains_weights

    def publish(self, key: MessageKey, tensor: Tensor) -> None:
        """Keep a tensor for whoever consumes it: a send, or an action of these very ranks."""
        self.store.put(key, tensor, size_bytes=size_of(tensor))

    def collect(self, key: MessageKey) -> Tensor:
        """Take a tensor that another action published here, or that a message brings; waits for it, running fillers first."""
        if not self.executor.must_travel(key.source, key.target):
            tensor: Tensor = self.store.take(key)
            return tensor
        while self.fillers and not self._is_filling and not self._is_there(key):
            self._run_filler()
        kind = ActionKind.RECEIVE_FORWARD if key.direction == "forward" else ActionKind.RECEIVE_BACKWARD
        with self.executor.clock.span(Action(kind, *key.target, peer=key.source, part=key.part)):
            self.executor.broker.wait(key)
            received = self.executor.broker.complete(key, self.executor.tensor_parallel_group(key.target.unit))
        self.store.grow(-self.store.take(("posted", key)))
        return received

    def run_fillers(self) -> None:
        """Run the fillers that their carrier had no time for."""
        while self.fillers:
            self._run_filler()

    def start_collective(self, action: Action, start: Callable[[int], Callable[[], None]]) -> None:
        """Start a collective action of a stage; what `start` returns waits for it where it is needed, or at the step's end."""
        self.collectives[action] = start(action.stage)

    def finish_collective(self, action: Action) -> None:
        """Wait for a collective action, if it is under way; its event is the time the lane stood still for it."""
        if action in self.collectives:
            with self.executor.clock.span(action):
                self.collectives.pop(action)()

    def post_receive(self, action: Action) -> None:
        """Start a receive action."""
        assert action.peer is not None
        direction = "forward" if action.kind is ActionKind.RECEIVE_FORWARD else "backward"
        key = MessageKey(direction, action.peer, action.place, action.part)
        size_bytes = self.executor.broker.post_receive(key, self.link(key))
        self.store.put(("posted", key), size_bytes, size_bytes=0)
        self.store.grow(size_bytes)

    def send(self, action: Action) -> None:
        """Run a send action."""
        assert action.peer is not None
        direction = "forward" if action.kind is ActionKind.SEND_FORWARD else "backward"
        key = MessageKey(direction, action.place, action.peer, action.part)
        self.executor.broker.send(key, self.link(key), self.store.take(key))

    def link(self, key: MessageKey) -> Link:
        """Ranks and shape of a message."""
        upstream, downstream = (key.source, key.target) if key.direction == "forward" else (key.target, key.source)
        ranks = self.executor.ranks_of(key.source), self.executor.ranks_of(key.target)
        if upstream.unit == downstream.unit:
            return Link(*ranks, self._hidden_shape(downstream, key.part), is_replicated=False)
        source, target = microbatch_of(upstream), microbatch_of(downstream)
        (route,) = (route for route in self.step.routes.from_source[source] if route.target == target)
        # An encoder's projector speaks the LLM's language; a generator translates what the LLM says itself.
        is_encoder = self.step.graph.unit(upstream.unit).role is Role.ENCODER
        hidden_size = self.step.graph.unit(downstream.unit if is_encoder else upstream.unit).transformer.hidden_size
        rows = self.step.placement.row_shares(route)
        rows = rows.reversed() if rows is not None and key.direction == "backward" else rows
        return Link(*ranks, (self.step.num_rows_of_route(route), hidden_size), is_replicated=True, rows=rows)

    def output_rows(self, route: Route) -> Tensor:
        """[num_rows]: where the rows that this rank gives to a route lie in what it computes of the sample subset."""
        return self.step.placement.output_rows(route, rank=self.executor.context_parallel_rank(route.source.unit))

    def _hidden_shape(self, place: Place, part: int) -> tuple[int, ...]:
        """Hidden states of this rank's tokens, of one sample subset or all."""
        rank = self.executor.context_parallel_rank(place.unit)
        num_tokens = self.step.placement.num_tokens(microbatch_of(place), rank=rank)
        num_rows = map(self.executor.any_stage(place.unit).num_rows, num_tokens)
        rows = sum(num for index, num in enumerate(num_rows) if part in (-1, index))
        return (rows, 1, self.step.graph.unit(place.unit).transformer.hidden_size)

    def _run_filler(self) -> None:
        self._is_filling = True
        self.run_action(self, self.fillers.popleft())
        self._is_filling = False

    def _is_there(self, key: MessageKey) -> bool:
        """Whether a message has come; what the ranks of a stage do together, they must also decide together."""
        is_there = self.executor.broker.is_there(key)
        group = self.executor.stage_group(key.target.unit)
        if group.size() == 1 or all(filler.kind is ActionKind.WEIGHT_GRADIENT for filler in self.fillers):
            return is_there  # Weight gradients make no collective calls.
        answer = torch.tensor([int(is_there)], device=self.executor.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
        return bool(answer.item())


def microbatch_of(place: Place) -> MicrobatchPlace:
    """The microbatch, whatever the stage."""
    return MicrobatchPlace(place.unit, place.replica, place.microbatch)
