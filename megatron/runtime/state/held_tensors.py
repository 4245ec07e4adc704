"""Weights and optimizer state that this rank holds, under names that no plan changes: `model.<unit>.<parameter>` and so on.

A rank holds a tensor parallel shard of a parameter, of which a sharded optimizer (ZeRO-1) keeps a range of flat elements. In the
whole parameter such a range is a few rectangles (three for a matrix: rest of a row, whole rows, start of a row; twice as many for
a gated MLP's two blocks), each contiguous in the rank's memory: it is written, read and sent in place, without gathering.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.unit_optimizer import AVERAGE, OptimizerKey, ShardedOptimizer
from multimodal.model.adapter import Adapter, is_adapter
from multimodal.model.layers.registry import sharding_of
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding, full_shape
from multimodal.model.unit_stage import UnitStage


class TrainedState(NamedTuple):
    """The part of the model that one rank trains under one plan."""

    stages: Mapping[tuple[str, int], UnitStage]
    """(unit, virtual stage) -> module."""
    gradients: Mapping[str, UnitGradients]
    """Unit -> its gradients."""
    optimizers: Mapping[OptimizerKey, MegatronOptimizer]
    """Optimizers of the parameters that this rank trains; empty if nothing is updated."""


class Box(NamedTuple):
    """A rectangle of a tensor: its start in every dimension, and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements in it."""
        return math.prod(self.sizes)

    def common(self, other: "Box") -> "Box | None":
        """Return the rectangle that two rectangles of a tensor have in common."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self.ends, other.ends)
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def outside(self, other: "Box") -> "Iterator[Box]":
        """Yield the parts that another rectangle does not cover, dimension by dimension."""
        common = self.common(other)
        if common is None:
            yield self
            return
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dimension, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            for first, stop in ((self.offsets[dimension], start), (end, self.ends[dimension])):
                if first < stop:
                    offsets[dimension], sizes[dimension] = first, stop - first
                    yield Box(tuple(offsets), tuple(sizes))
            offsets[dimension], sizes[dimension] = start, end - start

    def part_of(self, values: Tensor, inner: "Box") -> Tensor:
        """Return the part of this rectangle's values that an inner rectangle covers; a view."""
        starts = (inner_offset - offset for inner_offset, offset in zip(inner.offsets, self.offsets, strict=True))
        return values[tuple(slice(start, start + size) for start, size in zip(starts, inner.sizes, strict=True))]

    @property
    def ends(self) -> tuple[int, ...]:
        """The end in every dimension."""
        return tuple(map(add, self.offsets, self.sizes))


class Piece(NamedTuple):
    """A rectangle of a whole parameter, and this rank's values there."""

    offsets: tuple[int, ...]
    values: Tensor
    """Values in the shape of the rectangle; a view of the tensor that the rank trains with."""

    @property
    def box(self) -> Box:
        """The rectangle of the whole tensor that the values fill."""
        return Box(self.offsets, tuple(self.values.shape))


_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class HeldTensor:
    """This rank's part of one tensor."""

    key: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    is_copy: bool
    """True if another rank holds and writes the same: for tied embeddings the first stage, for replicated tensors tensor parallel
    rank 0, and for unlike replicas the first one."""

    def fill(self, given: Piece) -> None:
        """Copy what this rank holds of a rectangle of the whole tensor."""
        for piece in self.pieces:
            if common := piece.box.common(given.box):
                piece.box.part_of(piece.values, common).copy_(given.box.part_of(given.values, common))


def pieces_by_key(tensors: Iterable[HeldTensor]) -> dict[str, list[Piece]]:
    """Return the pieces of tensors, some of which may have one key."""
    found: dict[str, list[Piece]] = {}
    for tensor in tensors:
        found.setdefault(tensor.key, []).extend(tensor.pieces)
    return found


class _Parameter(NamedTuple):
    unit: str
    name: str
    value: Tensor
    sharding: ParameterSharding
    stage: UnitStage
    is_replica: bool
    """True if another replica holds and writes the same, because replicas are not alike, or state is kept in several copies."""

    @property
    def shape(self) -> tuple[int, ...]:
        return full_shape(self.value.shape, self.sharding, tensor_parallel_size=self.stage.groups.tp.size())

    @property
    def is_copy(self) -> bool:
        is_replicated = self.sharding == WHOLE and self.stage.groups.tp.rank() > 0
        return self.is_replica or getattr(self.value, "shared", False) or is_replicated

    def key(self, kind: str) -> str:
        return f"{kind}.{self.unit}.{self.name}"

    def hold(self, kind: str, values: Tensor, elements: range) -> HeldTensor:
        """Return a held tensor; values: [len(elements)], the values of these flat elements of the shard."""
        pieces = pieces_of_shard(
            values,
            elements=elements,
            shape=tuple(self.value.shape),
            sharding=self.sharding,
            rank=self.stage.groups.tp.rank(),
            tensor_parallel_size=self.stage.groups.tp.size(),
        )
        return HeldTensor(self.key(kind), self.shape, values.dtype, pieces, self.is_copy)


class _OptimizerPart(NamedTuple):
    """An optimizer's values on this rank for one parameter."""

    main: Tensor
    """The tensor that it steps: flat elements of the parameter, or in bf16 runs their float32 copy."""
    elements: range
    group: dict[str, Any]
    state: dict[str, Any]
    """Empty before the first step."""


def model_tensors(state: TrainedState) -> list[HeldTensor]:
    """Return all parameters of this rank's stages, frozen ones and adapters, too, as views; of sharded weights its own part."""
    return list(_held_weights(state, {}))


def merged_tensors(state: TrainedState, adapters: Mapping[str, Adapter]) -> Iterator[HeldTensor]:
    """Yield the same without adapters, which are added to their weights in at least float32; one copy at a time.

    adapters: by the key of the weight; whole on this rank.
    """
    return (tensor for tensor in _held_weights(state, adapters) if not is_adapter(tensor.key))


def rows_of_tensor(tensor: HeldTensor, rows: range, *, key: str) -> HeldTensor:
    """Return some rows of a tensor as a tensor of its own; views."""
    pieces = []
    for piece in tensor.pieces:
        held = piece.offsets[0]
        first, stop = max(held, rows.start), min(held + len(piece.values), rows.stop)
        if first < stop:
            pieces.append(Piece((first - rows.start, *piece.offsets[1:]), piece.values[first - held : stop - held]))
    return replace(tensor, key=key, shape=(len(rows), *tensor.shape[1:]), pieces=tuple(pieces))


def _held_weights(state: TrainedState, adapters: Mapping[str, Adapter]) -> Iterator[HeldTensor]:
    partial = {parameter: piece for unit in state.gradients.values() for parameter, piece in unit.partial_pieces().items()}
    for parameter in _parameters(state):
        values, elements = parameter.value.detach().view(-1), range(parameter.value.numel())
        if parameter.value in partial:
            piece = partial[parameter.value]
            if piece is None:
                continue
            values, elements = piece.weight, piece.elements
        if adapter := adapters.get(parameter.key("model")):
            values = adapter.merged_with(values, elements)
        yield parameter.hold("model", values, elements)


def optimizer_tensors(state: TrainedState) -> list[HeldTensor]:
    """Return moments, averages, step counts and float32 main parameters of this rank's optimizers; the pieces are views."""
    held = []
    for parameter, part in _optimizer_parts(state):
        if part.main.dtype != parameter.value.dtype:
            held.append(parameter.hold("main", part.main.detach().view(-1), part.elements))
        if part.state:
            kinds = [*_MOMENTS, *[AVERAGE] * (AVERAGE in part.state)]
            held += [parameter.hold(kind, part.state[kind].view(-1), part.elements) for kind in kinds]
            is_own = "step" in part.state  # else the optimizer counts per group, and gets the count by `fill_optimizers`
            count = part.state["step"].view(1) if is_own else torch.tensor([float(part.group.get("step", 0))])
            pieces = (Piece((0,), count),)
            held.append(HeldTensor(parameter.key("step"), (1,), torch.float32, pieces, parameter.is_copy))
    return held


def average_key(key: str) -> str:
    """Return the key of the average over the steps of the weight with this key."""
    return f"{AVERAGE}.{key.removeprefix('model.')}"


def is_average(key: str) -> bool:
    """Return True if a tensor is the average of a weight."""
    return key.startswith(f"{AVERAGE}.")


def make_room(state: TrainedState, *, saved: Collection[str]) -> set[str]:
    """Make room for `saved` state in optimizers that never stepped; clears that of others, and returns their units."""
    fresh_units = set()
    for parameter, part in _optimizer_parts(state):
        if not all(parameter.key(kind) in saved for kind in (*_MOMENTS, "step")):
            part.state.clear()
            fresh_units.add(parameter.unit)
        elif not part.state:
            part.state.update({moment: torch.zeros_like(part.main.detach()) for moment in _MOMENTS})
            if USING_PYTORCH_OPTIMIZER:
                part.state["step"] = torch.zeros((), dtype=torch.float32)
            if part.group["average_decay"] is not None and parameter.key(AVERAGE) in saved:
                part.state[AVERAGE] = torch.zeros_like(part.main.detach())
    return fresh_units


def fill_optimizers(state: TrainedState, *, saved: Collection[str], fill: Callable[[Sequence[HeldTensor]], None]) -> set[str]:
    """Let `fill` put the saved values into this rank's optimizers; returns units with parameters whose state starts fresh.

    saved: names of the tensors that there are; fill: called once, with those of them that this rank has.
    """
    fresh_units = make_room(state, saved=saved)
    tensors = [tensor for tensor in optimizer_tensors(state) if tensor.key in saved]
    fill(tensors)
    counts = {tensor.key: tensor.pieces[0].values for tensor in tensors}
    for parameter, part in _optimizer_parts(state):
        if parameter.key("step") in counts and "step" not in part.state:
            part.group["step"] = int(counts[parameter.key("step")])  # Transformer Engine's and Apex's count per group
    return fresh_units


def _parameters(state: TrainedState) -> Iterator[_Parameter]:
    for (unit, _), stage in state.stages.items():
        gradients = state.gradients.get(unit)
        is_replica = False
        if gradients is not None:
            is_replica = gradients.is_copy or (gradients.membership.is_unlike and not gradients.membership.is_first_holder)
        for name, value in stage.named_parameters():
            yield _Parameter(unit, name, value, sharding_of(stage.unit, name), stage, is_replica)


def _optimizer_parts(state: TrainedState) -> Iterator[tuple[_Parameter, _OptimizerPart]]:
    for parameter in _parameters(state):
        if part := _optimizer_part(state.optimizers.get(OptimizerKey.of(parameter.unit, parameter.value)), parameter.value):
            if (shares := state.gradients[parameter.unit].shares) is not None:
                parameter = parameter._replace(is_replica=shares.is_copy(parameter.value))
            yield parameter, part


def _optimizer_part(optimizer: MegatronOptimizer | None, parameter: Tensor) -> _OptimizerPart | None:
    if optimizer is None or not parameter.requires_grad:
        return None
    groups, states = optimizer.optimizer.param_groups, optimizer.optimizer.state
    if isinstance(optimizer, ShardedOptimizer):
        if parameter not in optimizer.stepped:  # other ranks keep all of it
            return None
        piece, main = optimizer.stepped[parameter]
        group = next(group for group in groups if any(member is main for member in group["params"]))
        return _OptimizerPart(main, piece.elements, group, states[main])
    if not isinstance(optimizer, DistributedOptimizer):
        group = next(group for group in groups if any(member is parameter for member in group["params"]))
        return _OptimizerPart(parameter, range(parameter.numel()), group, states[parameter])
    if parameter not in optimizer.model_param_group_index_map:  # other replicas keep all of it
        return None
    index, position = optimizer.model_param_group_index_map[parameter]
    main = groups[index]["params"][position]
    kept = optimizer._get_model_param_range_map(parameter)["param"]
    return _OptimizerPart(main, range(kept.start, kept.end), groups[index], states[main])


def pieces_of_shard(
    values: Tensor, *, elements: range, shape: tuple[int, ...], sharding: ParameterSharding, rank: int, tensor_parallel_size: int
) -> tuple[Piece, ...]:
    """Return the rectangles of the whole parameter that `values` covers.

    values: [len(elements)], contiguous: these flat elements of the shard; shape: of the shard; rank: tensor parallel rank.
    """
    assert sharding.num_blocks == 1 or sharding.dimension == 0, "blocks are stacked along the first dimension"
    pieces, position, block_size = [], 0, math.prod(shape) // sharding.num_blocks
    for block in range(sharding.num_blocks):
        inside = range(max(elements.start, block * block_size), min(elements.stop, (block + 1) * block_size))
        for box in boxes_of_flat_range(shape, inside):
            size, offsets = box.num_elements, list(box.offsets)
            if sharding.dimension is not None:
                rows = shape[sharding.dimension] // sharding.num_blocks
                offsets[sharding.dimension] += rows * (block * (tensor_parallel_size - 1) + rank)
            pieces.append(Piece(tuple(offsets), values[position : position + size].view(box.sizes)))
            position += size
    return tuple(pieces)


def boxes_of_flat_range(shape: tuple[int, ...], elements: range) -> tuple[Box, ...]:
    """Return a range of a tensor's flat elements as rectangles, in the order of the elements."""
    row_size = math.prod(shape[1:])
    found, cursor = [], elements.start
    while cursor < elements.stop:
        row, column = divmod(cursor, row_size)
        num_rows = (elements.stop - cursor) // row_size
        if column == 0 and num_rows > 0:
            found.append(Box((row, *(0 for _ in shape[1:])), (num_rows, *shape[1:])))
            cursor += num_rows * row_size
            continue
        stop = min(elements.stop, (row + 1) * row_size)
        inner = boxes_of_flat_range(shape[1:], range(column, column + stop - cursor))
        found.extend(Box((row, *box.offsets), (1, *box.sizes)) for box in inner)
        cursor = stop
    return tuple(found)
