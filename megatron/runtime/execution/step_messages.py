"""A rank's resources for all its steps, and the messages of its computations in one step.

Activations go forward and gradients go back, wherever the other end runs.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from megatron.runtime.communication.broker import Broker, Link, MessageKey, RowShares
from megatron.runtime.execution.activation_store import storage_identity
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.step_clock import StepClock
from megatron.runtime.execution.step_inputs import StepInputs
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from megatron.runtime.step.step import Step
from multimodal.model.unit_stage import UnitStage
from multimodal.values.action import Action, Coverage, Place, SampleSubset
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

Received = tuple[tuple[Route, Tensor], ...]
"""Tensors that other units hand to a microbatch, by route."""
_FAR_APART = 2**40
"""More than the number of rows of a sample subset."""


class RankResources:
    """Resources that are the same for all steps: this rank's stages, the broker, the clock.

    stages: (unit, virtual stage) -> module; groups: unit -> this rank's groups there (tp, cp and tp_cp); gradients: by unit.
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        plan: Plan,
        rank: int,
        stages: Mapping[tuple[str, int], UnitStage],
        groups: Mapping[str, ProcessGroupCollection],
        broker: Broker,
        device: torch.device,
        gradients: Mapping[str, UnitGradients | ShardedUnit],
    ) -> None:
        self.graph, self.plan, self.rank, self.stages, self.device = graph, plan, rank, stages, device
        self.broker, self.gradients, self.lane = broker, gradients, plan.lane_of_rank[rank]
        self.sharded = {
            (name, index): stage
            for name, unit in gradients.items()
            if isinstance(unit, ShardedUnit)
            for index, stage in unit.sharded.items()
        }
        """The stages whose weights are sharded."""
        self.clock = StepClock(lane=self.lane)
        self.parameter_storages = frozenset(
            storage_identity(parameter) for stage in stages.values() for parameter in stage.parameters()
        )
        self._groups = groups

    def ranks_of(self, place: Place) -> tuple[int, ...]:
        """Ranks of a virtual stage."""
        return self.plan.virtual_stage(place.unit, place.replica, place.stage).ranks

    def any_stage(self, unit: str) -> UnitStage:
        """Return any stage of this rank in a unit (they share their configuration)."""
        return next(stage for (name, _), stage in self.stages.items() if name == unit)

    def tensor_parallel_group(self, unit: str) -> dist.ProcessGroup:
        """This rank's tensor parallel group in a unit."""
        group: dist.ProcessGroup = self._groups[unit].tp
        return group

    def context_parallel_rank(self, unit: str) -> int:
        """The index of this rank's share of the tokens in a unit."""
        rank: int = self._groups[unit].cp.rank()
        return rank


class StepMessages(LaneRun):
    """The messages of a step between stages and between units, derived from plan, assignment and lengths."""

    def __init__(self, executor: RankResources, step: Step) -> None:
        super().__init__(broker=executor.broker, clock=executor.clock)
        self.executor, self.step = executor, step
        self.inputs = StepInputs(step, rank=executor.rank, device=executor.device)

    def stage(self, place: Place) -> UnitStage:
        """Return the module of a virtual stage of this rank."""
        return self.executor.stages[(place.unit, place.stage)]

    def complete(self, key: MessageKey) -> Tensor:
        """Return the tensor that a message brought to this rank and its tensor parallel peers."""
        return self.broker.complete(key, self.executor.tensor_parallel_group(key.target.unit))

    def link(self, key: MessageKey) -> Link:
        """Return the ranks and the shape of a message."""
        upstream, downstream = (key.source, key.target) if key.direction == "forward" else (key.target, key.source)
        ranks = self.executor.ranks_of(key.source), self.executor.ranks_of(key.target)
        if upstream.unit == downstream.unit and len(ranks[0]) != len(ranks[1]):
            return self._resized_link(key, *ranks)
        if upstream.unit == downstream.unit:
            shape = self._hidden_shape(downstream, key.covers, width=self._width_behind(upstream))
            return Link(*ranks, shape, is_replicated=False)
        source, target = upstream.microbatch_place, downstream.microbatch_place
        (route,) = (route for route in self.step.routes.from_source[source] if route.target == target)
        width = self._width_behind(upstream)
        rows = self.inputs.row_shares(route)
        rows = rows.reversed if rows is not None and key.direction == "backward" else rows
        return Link(*ranks, (self.step.num_rows_of_route(route), width), is_replicated=True, rows=rows)

    def collect_inputs(self, action: Action) -> tuple[Tensor | None, Received]:
        """Take the inputs of a forward: the hidden states of the stage before, or in a unit's first stage upstream outputs."""
        place = action.place
        if action.stage > 0:
            return self.collect(MessageKey("forward", place._replace(stage=action.stage - 1), place)), ()
        routes = self.step.routes.to_target.get(place.microbatch_place, ())
        return None, tuple(
            (route, self.collect(MessageKey("forward", self._last_place(route.source), place))) for route in routes
        )

    def publish_outputs(self, action: Action, outputs: list[Tensor]) -> None:
        """Hand on a forward's outputs (one per sample subset): all to the next stage, or to each consumer its rows."""
        place = action.place
        if not self.stage(place).is_last:
            whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            self.publish(MessageKey("forward", place, place._replace(stage=action.stage + 1)), whole)
            return
        for route in self.step.routes.from_source.get(place.microbatch_place, ()):
            output = outputs[self.step.part_of(route)]
            rows = output.index_select(0, self.inputs.output_rows(route))
            self.publish(MessageKey("forward", place, _first_place(route.target)), rows)

    def collect_output_gradient(self, action: Action, shape: torch.Size) -> Tensor:
        """Take the gradient of a forward's output (of one sample subset: `action.subset`)."""
        place = action.place
        if not self.stage(place).is_last:
            return self.collect(MessageKey("backward", place._replace(stage=action.stage + 1), place, action.covers))
        gradient: Tensor | None = None
        for route in self.step.routes.from_source.get(place.microbatch_place, ()):
            if action.subset not in (-1, self.step.part_of(route)):
                continue
            found = self.collect(MessageKey("backward", _first_place(route.target), place))
            gradient = found.new_zeros(shape) if gradient is None else gradient
            gradient.index_add_(0, self.inputs.output_rows(route), found)
        assert gradient is not None, f"{place} feeds nobody"
        return gradient

    def publish_input_gradients(self, action: Action, hidden: Tensor | None, items: Received) -> None:
        """Hand back the gradients of a forward's inputs."""
        if hidden is not None and hidden.requires_grad:
            before = action.place._replace(stage=action.stage - 1)
            self.publish(MessageKey("backward", action.place, before, action.covers), _gradient_of(hidden))
        for route, tensor in items:
            if tensor.requires_grad:
                self.publish(MessageKey("backward", action.place, self._last_place(route.source)), _gradient_of(tensor))

    def _last_place(self, source: MicrobatchPlace) -> Place:
        """Return the place of a microbatch in its unit's last stage."""
        last = self.executor.plan.units[source.unit].num_stages_of(source.replica) - 1
        return Place(source.unit, source.replica, last, source.microbatch)

    def _resized_link(self, key: MessageKey, source_ranks: tuple[int, ...], target_ranks: tuple[int, ...]) -> Link:
        """Return the link of hidden states between stages of different tensor parallel sizes, for one context parallel rank.

        Under sequence parallelism each rank has its own rows, and stages pad to different numbers: rows that one end lacks are
        zero.
        """
        unit, context_rank = key.source.unit, self.executor.context_parallel_rank(key.source.unit)
        plan = self.executor.plan.units[unit]
        source, target = (
            plan.tensor_parallel_groups(plan.replicas[each.replica].virtual_stages[each.stage])[context_rank]
            for each in (key.source, key.target)
        )
        width = self._width_behind(min(key.source, key.target, key=lambda place: place.stage))
        if not self.executor.any_stage(unit).options.sequence_parallel:
            rows = self._hidden_shape(key.source, key.covers, width=width)[0]
            return Link(source, target, (rows, 1, width), is_replicated=True)
        given, taken = (self._rows_by_rank(key.source, key.covers, size=len(group)) for group in (source, target))
        shares = RowShares(given=given, taken=taken)
        return Link(source, target, (sum(map(len, given)), 1, width), is_replicated=True, rows=shares)

    def _rows_by_rank(self, place: Place, covers: Coverage, *, size: int) -> tuple[NDArray[np.int64], ...]:
        """Return the rows of each tensor parallel rank of a stage of this size; sample subsets have distant row numbers."""
        rank, context = self.executor.context_parallel_rank(place.unit), self.executor.any_stage(place.unit).context.input_context
        num_tokens = self.step.placement.num_tokens(place.microbatch_place, rank=rank)
        of_subsets = [
            (index, context._replace(tensor_parallel_size=size).num_padded_rows(count) // size)
            for index, count in enumerate(num_tokens)
            if covers in (None, SampleSubset(index))
        ]
        return tuple(
            np.concatenate([index * _FAR_APART + number * rows + np.arange(rows) for index, rows in of_subsets])
            for number in range(size)
        )

    def _width_behind(self, place: Place) -> int:
        """Return the channels of a virtual stage's output."""
        layers = self.executor.plan.virtual_stage(place.unit, place.replica, place.stage).layers
        return self.step.graph.width_behind(place.unit, layers.stop - 1)

    def _hidden_shape(self, place: Place, covers: Coverage, *, width: int) -> tuple[int, ...]:
        """Return the shape of hidden states of this rank's tokens, of one sample subset or all."""
        rank = self.executor.context_parallel_rank(place.unit)
        num_tokens = self.step.placement.num_tokens(place.microbatch_place, rank=rank)
        num_rows = map(self.executor.any_stage(place.unit).num_rows, num_tokens)
        rows = sum(num for index, num in enumerate(num_rows) if covers in (None, SampleSubset(index)))
        return rows, 1, width


def _first_place(target: MicrobatchPlace) -> Place:
    return Place(target.unit, target.replica, 0, target.microbatch)


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
