"""A rank's resources for all its steps, and the messages of its computations in one step.

Activations go forward and gradients go back, wherever the other end runs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
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
from multimodal.values.assignment import Route
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, VirtualStage

Inputs = Mapping[Route | None, Tensor]
"""Inputs of a forward: in a unit's first stage tensors of other units, by route; else, under None, the stage's hidden states."""
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
        self.broker, self.gradients, self.groups, self.lane = broker, gradients, groups, plan.lane_of_rank[rank]
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

    def any_stage(self, unit: str) -> UnitStage:
        """Return any stage of this rank in a unit (they share their configuration)."""
        return next(stage for (name, _), stage in self.stages.items() if name == unit)


class StepMessages(LaneRun):
    """The messages of a step between stages and between units, derived from plan, assignment and lengths."""

    def __init__(self, executor: RankResources, step: Step) -> None:
        super().__init__(broker=executor.broker, clock=executor.clock)
        self.executor, self.step = executor, step
        self.data = StepInputs(step, rank=executor.rank, device=executor.device)

    def stage(self, place: Place) -> UnitStage:
        """Return the module of a virtual stage of this rank."""
        return self.executor.stages[(place.unit, place.stage)]

    def complete(self, key: MessageKey) -> Tensor:
        """Return the tensor that a message brought to this rank and its tensor parallel peers."""
        return self.broker.complete(key, self.executor.groups[key.target.unit].tp)

    def link(self, key: MessageKey) -> Link:
        """Return the ranks and the shape of a message."""
        upstream, downstream = (key.source, key.target) if key.direction == "forward" else (key.target, key.source)
        source_ranks, target_ranks = (self._virtual_stage(each).ranks for each in (key.source, key.target))
        width = self.step.graph.width_behind(upstream.unit, self._virtual_stage(upstream).layers.stop - 1)
        if upstream.unit == downstream.unit and len(source_ranks) != len(target_ranks):
            return self._resized_link(key, width=width)
        if upstream.unit == downstream.unit:
            shape = self._hidden_shape(downstream, key.covers, width=width)
            return Link(source_ranks, target_ranks, shape, is_replicated=False)
        source, target = upstream.microbatch_place, downstream.microbatch_place
        (route,) = (route for route in self.step.routes.from_source[source] if route.target == target)
        rows = self.data.row_shares(route)
        rows = rows.reversed if rows is not None and key.direction == "backward" else rows
        return Link(source_ranks, target_ranks, (self.step.num_rows_of_route(route), width), is_replicated=True, rows=rows)

    def inputs_of(self, place: Place) -> Sequence[tuple[Route | None, MessageKey]]:
        """Return the messages that a forward takes: those of its routes or, under None, that of the stage before."""
        if place.stage > 0:
            return [(None, MessageKey("forward", place._replace(stage=place.stage - 1), place))]
        keys = []
        for route in self.step.routes.to_target.get(place.microbatch_place, ()):
            source = route.source
            last = self.executor.plan.units[source.unit].num_stages_of(source.replica) - 1
            keys.append((route, MessageKey("forward", Place(source.unit, source.replica, last, source.microbatch), place)))
        return keys

    def outputs_of(self, place: Place) -> Sequence[tuple[Route | None, MessageKey]]:
        """Return the messages that a forward gives: to the consumers of its routes or, under None, to the next stage."""
        if not self.stage(place).is_last:
            return [(None, MessageKey("forward", place, place._replace(stage=place.stage + 1)))]
        routes = self.step.routes.from_source.get(place.microbatch_place, ())
        ends = ((route, route.target) for route in routes)
        return [(route, MessageKey("forward", place, Place(end.unit, end.replica, 0, end.microbatch))) for route, end in ends]

    def publish_outputs(self, place: Place, outputs: Sequence[Tensor]) -> None:
        """Hand on a forward's outputs (one per sample subset): all to the next stage, or to each consumer its rows."""
        for route, key in self.outputs_of(place):
            if route is None:
                self.publish(key, outputs[0] if len(outputs) == 1 else torch.cat(list(outputs)))
            else:
                self.publish(key, outputs[self.step.part_of(route)].index_select(0, self.data.output_rows(route)))

    def collect_output_gradient(self, action: Action, shape: torch.Size) -> Tensor:
        """Take the gradient of a forward's output (of one sample subset: `action.subset`)."""
        gradient: Tensor | None = None
        for route, key in self.outputs_of(action.place):
            if route is None:
                return self.collect(key.answered(action.covers))
            if action.subset in (-1, self.step.part_of(route)):
                found = self.collect(key.answered())
                gradient = found.new_zeros(shape) if gradient is None else gradient
                gradient.index_add_(0, self.data.output_rows(route), found)
        assert gradient is not None, f"{action.place} feeds nobody"
        return gradient

    def publish_input_gradients(self, action: Action, inputs: Inputs) -> None:
        """Hand back the gradients of a forward's inputs."""
        for route, key in self.inputs_of(action.place):
            if (tensor := inputs[route]).requires_grad:
                self.publish(key.answered(action.covers if route is None else None), _gradient_of(tensor))

    def _resized_link(self, key: MessageKey, *, width: int) -> Link:
        """Return the link of hidden states between stages of different tensor parallel sizes, for one context parallel rank.

        Under sequence parallelism each rank has its own rows, and stages pad to different numbers: rows that one end lacks are
        zero.
        """
        unit = key.source.unit
        groups = (
            self.executor.plan.units[unit].tensor_parallel_groups(self._virtual_stage(each)) for each in (key.source, key.target)
        )
        source, target = (of_stage[self._context_rank(unit)] for of_stage in groups)
        if not self.executor.any_stage(unit).options.sequence_parallel:
            rows = self._hidden_shape(key.source, key.covers, width=width)[0]
            return Link(source, target, (rows, 1, width), is_replicated=True)
        given, taken = (self._rows_by_rank(key.source, key.covers, size=len(group)) for group in (source, target))
        shares = RowShares(given=given, taken=taken)
        return Link(source, target, (sum(map(len, given)), 1, width), is_replicated=True, rows=shares)

    def _virtual_stage(self, place: Place) -> VirtualStage:
        return self.executor.plan.virtual_stage(place.unit, place.replica, place.stage)

    def _context_rank(self, unit: str) -> int:
        """Return the index of this rank's share of the tokens in a unit."""
        return self.executor.groups[unit].cp.rank()

    def _rows_by_rank(self, place: Place, covers: Coverage, *, size: int) -> tuple[NDArray[np.int64], ...]:
        """Return the rows of each tensor parallel rank of a stage of this size; sample subsets have distant row numbers."""
        rank, context = self._context_rank(place.unit), self.executor.any_stage(place.unit).context.input_context
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

    def _hidden_shape(self, place: Place, covers: Coverage, *, width: int) -> tuple[int, ...]:
        """Return the shape of hidden states of this rank's tokens, of one sample subset or all."""
        rank = self._context_rank(place.unit)
        num_tokens = self.step.placement.num_tokens(place.microbatch_place, rank=rank)
        num_rows = map(self.executor.any_stage(place.unit).num_rows, num_tokens)
        rows = sum(num for index, num in enumerate(num_rows) if covers in (None, SampleSubset(index)))
        return rows, 1, width


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
