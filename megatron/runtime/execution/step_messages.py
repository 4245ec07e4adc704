"""A rank's resources for all its steps; of one step its inputs on the rank's device, and the tensors of its messages."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from megatron.runtime.communication.broker import Broker, Link, RowShares
from megatron.runtime.execution.activation_store import storage_identity
from megatron.runtime.execution.lane_run import LaneRun
from megatron.runtime.execution.step_clock import StepClock
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.step.step import ROUTES, Step
from megatron.runtime.step.token_placement import RouteRows
from multimodal.attention.device_values import Parcel, map_tensors
from multimodal.balance.batch_work import list_items
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.action import Coverage, MessageKey, Place, SampleSubset
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan, VirtualStage
from multimodal.values.schedule import Entry

Inputs = Mapping[Place, Tensor]
"""Inputs of a forward by where they come from: in a unit's first stage tensors of other units, else the stage's hidden states."""
_FAR_APART = 2**40
"""More than the number of rows of a sample subset."""


@dataclass(kw_only=True, eq=False)
class RankResources:
    """Resources of a rank that are alike for all steps."""

    graph: ModelGraph
    plan: Plan
    rank: int
    stages: Mapping[tuple[str, int], UnitStage]
    """(unit, virtual stage) -> module."""
    groups: Mapping[str, ProcessGroupCollection]
    """Unit -> this rank's groups there (tp, cp and tp_cp)."""
    broker: Broker
    device: torch.device
    gradients: Mapping[str, UnitGradients]

    def __post_init__(self) -> None:
        self.lane = self.plan.lane_of_rank[self.rank]
        self.sharded = {(name, index): stage for name, unit in self.gradients.items() for index, stage in unit.sharded.items()}
        """The stages whose weights are sharded."""
        self.clock = StepClock(lane=self.lane)
        parameters = (parameter for stage in self.stages.values() for parameter in stage.parameters())
        self.parameter_storages = frozenset(map(storage_identity, parameters))

    def any_stage(self, unit: str) -> UnitStage:
        """Return any stage of this rank in a unit (they share their configuration)."""
        return next(stage for (name, _), stage in self.stages.items() if name == unit)


class StepInputs:
    """Copies a step's inputs on a stream beside the computations, which wait for them: parcels at once, others piece by piece."""

    def __init__(self, step: Step, *, device: torch.device) -> None:
        self._step, self._device = step, device
        self._opened: dict[Hashable, Any] = {}
        self._coming: dict[Hashable, tuple[Parcel, torch.cuda.Event]] = {}
        if device.type == "cuda" and step.parcels:
            stream = _copy_stream(device)
            with torch.cuda.stream(stream):
                for key, parcel in step.parcels.items():
                    self._coming[key] = parcel._replace(buffer=parcel.buffer.to(device, non_blocking=True)), stream.record_event()

    def of(self, place: MicrobatchPlace) -> tuple[PackedInput, ...]:
        """Return the inputs of a microbatch, one per sample subset."""
        found: tuple[PackedInput, ...] = self._open(place)
        return tuple(self._without_dropped(batch, place) for batch in found) if self._step.dropped else found

    def _without_dropped(self, batch: PackedInput, place: MicrobatchPlace) -> PackedInput:
        """Return an input whose targets of dropped samples weigh nothing."""
        step, role = self._step, self._step.graph.unit(place.unit).role
        if role is Role.ENCODER:
            return batch
        samples: Iterable[int] = step.target_samples.get(place, ())
        if role is Role.GENERATOR:
            images = list_items(step.assignment.atoms(place), unit=place.unit, lengths_by_sample=step.lengths)
            of_tokens = np.repeat([image.sample_id for image in images], batch.lengths)
            of_tokens = of_tokens if batch.share is None else of_tokens[batch.share.positions]
            samples = (of_tokens if batch.target_rows is None else of_tokens[batch.target_rows.cpu().numpy()]).tolist()
        is_kept = torch.tensor([sample not in step.dropped for sample in samples], dtype=torch.float64, device=self._device)
        return replace(batch, target_weights=is_kept if batch.target_weights is None else is_kept * batch.target_weights)

    def rows_between(self, source: Place, target: Place) -> RouteRows:
        """Return the rows that travel from one unit to the next."""
        rows: RouteRows = self._open(ROUTES)[source.microbatch_place, target.microbatch_place]
        return rows

    def _open(self, key: Hashable) -> Any:
        if key not in self._opened and self._step.parcels:
            self._opened[key] = self._arrived(key).open()
        elif key not in self._opened:
            value: Any = self._step.route_rows if key == ROUTES else self._step.inputs[key]  # type: ignore[index]
            is_here = self._device.type == "cpu"
            self._opened[key] = value if is_here else map_tensors(value, lambda tensor: tensor.to(self._device))
        return self._opened[key]

    def _arrived(self, key: Hashable) -> Parcel:
        if key not in self._coming:
            parcel = self._step.parcels[key]
            # A buffer of its own, as on a device: the tensors of a microbatch are counted by storages.
            return parcel._replace(buffer=parcel.buffer.clone())
        parcel, copied = self._coming.pop(key)
        computing = torch.cuda.current_stream()
        computing.wait_event(copied)
        parcel.buffer.record_stream(computing)
        return parcel


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class StepMessages(LaneRun):
    """The tensors that a step's computations take from and give to other stages and other units."""

    def __init__(self, executor: RankResources, step: Step) -> None:
        super().__init__(broker=executor.broker, clock=executor.clock)
        self.executor, self.step = executor, step
        self.data = StepInputs(step, device=executor.device)

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
        route = self.data.rows_between(upstream, downstream)
        rows = route.shares.reversed if route.shares is not None and key.direction == "backward" else route.shares
        return Link(source_ranks, target_ranks, (route.num_rows, width), is_replicated=True, rows=rows)

    def publish_outputs(self, forward: Entry, outputs: Sequence[Tensor]) -> None:
        """Hand on a forward's outputs (one per sample subset): all to the next stage, or to each consumer its rows."""
        for key in forward.gives:
            if key.source.unit == key.target.unit:
                self.publish(key, outputs[0] if len(outputs) == 1 else torch.cat(list(outputs)))
            else:
                route = self.data.rows_between(key.source, key.target)
                self.publish(key, outputs[route.part].index_select(0, self.output_rows(key.source, key.target)))

    def collect_output_gradient(self, backward: Entry, shape: torch.Size) -> Tensor:
        """Take the gradient of a forward's output, or of one sample subset of it."""
        gradient: Tensor | None = None
        for key in backward.takes:
            found = self.collect(key)
            if key.source.unit == key.target.unit:
                return found
            gradient = found.new_zeros(shape) if gradient is None else gradient
            gradient.index_add_(0, self.output_rows(key.target, key.source), found)
        assert gradient is not None, f"{backward.action.place} feeds nobody"
        return gradient

    def publish_input_gradients(self, backward: Entry, inputs: Inputs) -> None:
        """Hand back the gradients of a forward's inputs."""
        for key in backward.gives:
            self.publish(key, _gradient_of(inputs[key.target]))

    def output_rows(self, source: Place, target: Place) -> Tensor:
        """[num_rows]: for each row that this rank gives to another unit, its index in the result of the sample subset."""
        rows = self.data.rows_between(source, target).output
        assert rows is not None, f"rank {self.executor.rank} gives nothing to {target}"
        return rows

    def _resized_link(self, key: MessageKey, *, width: int) -> Link:
        """Return the link between stages of different tensor parallel sizes; rows that only one end pads are zero."""
        unit, plan = key.source.unit, self.executor.plan.units[key.source.unit]
        groups = (plan.tensor_parallel_groups(self._virtual_stage(each)) for each in (key.source, key.target))
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
        return self.executor.groups[unit].cp.rank()

    def _rows_by_rank(self, place: Place, covers: Coverage, *, size: int) -> tuple[NDArray[np.int64], ...]:
        """Return the rows of each tensor parallel rank of a stage of this size; sample subsets have distant row numbers."""
        rank, context = self._context_rank(place.unit), self.executor.any_stage(place.unit).context.input_context
        num_tokens = self.step.placement.num_tokens(place.microbatch_place, rank=rank)
        sized = context._replace(tensor_parallel_size=size)
        counts = ((index, count) for index, count in enumerate(num_tokens) if covers in (None, SampleSubset(index)))
        of_subsets = [(index, sized.num_padded_rows(count) // size) for index, count in counts]
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
