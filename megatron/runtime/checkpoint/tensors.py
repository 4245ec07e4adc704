"""Which tensors of a checkpoint this rank holds, under names that no plan changes: `model.<unit>.<parameter>` and so on."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron.runtime.checkpoint.pieces import Piece, pieces_of_shard
from megatron.runtime.execution.assembly import RankRuntime
from megatron.runtime.gradients.sharded_layer import WeightPiece
from megatron.runtime.gradients.sharded_optimizer import ShardedOptimizer
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding, full_shape, sharding_of
from multimodal.model.unit_stage import UnitStage

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class HeldTensor:
    """This rank's part of one tensor of the checkpoint."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    is_copy: bool
    """Another holds the same and writes it: of tied embeddings the first stage, of what is not split tensor parallel rank 0."""


class _Parameter(NamedTuple):
    unit: str
    name: str
    value: Tensor
    sharding: ParameterSharding
    stage: UnitStage

    @property
    def shape(self) -> tuple[int, ...]:
        return full_shape(self.value.shape, self.sharding, tensor_parallel_size=self.stage.groups.tp.size())

    @property
    def is_copy(self) -> bool:
        return getattr(self.value, "shared", False) or (self.sharding == WHOLE and self.stage.groups.tp.rank() > 0)

    def key(self, kind: str) -> str:
        return f"{kind}.{self.unit}.{self.name}"

    def hold(self, kind: str, values: Tensor, elements: range) -> HeldTensor:
        """values: [len(elements)], these flat elements of the shard."""
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
    """What an optimizer keeps on this rank for one parameter."""

    main: Tensor
    """What it steps: flat elements of the parameter, or in bf16 runs their float32 form."""
    elements: range
    group: dict[str, Any]
    state: dict[str, Any]
    """Empty before the first step."""

    @property
    def step_count(self) -> Tensor:
        """[1]: a view where the optimizer counts per parameter, a copy where it counts per group."""
        if "step" in self.state:
            count: Tensor = self.state["step"].view(1)
            return count
        return torch.tensor([float(self.group.get("step", 0))])


def model_tensors(runtime: RankRuntime) -> list[HeldTensor]:
    """All parameters of this rank's stages, frozen ones too; the pieces are views of them.

    Of sharded weights only what this rank keeps.
    """
    sharded = {name: unit for name, unit in runtime.gradients.items() if isinstance(unit, ShardedUnit)}
    pieces: dict[Tensor, WeightPiece] = {piece.parameter: piece for unit in sharded.values() for piece in unit.pieces}
    held = []
    for parameter in _parameters(runtime):
        if parameter.unit not in sharded:
            held.append(parameter.hold("model", parameter.value.detach().view(-1), range(parameter.value.numel())))
        elif piece := pieces.get(parameter.value):
            held.append(parameter.hold("model", piece.weight, piece.elements))
    return held


def optimizer_tensors(runtime: RankRuntime, optimizers: Mapping[str, MegatronOptimizer]) -> list[HeldTensor]:
    """Moments, step counts and float32 main parameters that this rank's optimizers keep; the pieces are views of them."""
    held = []
    for parameter, part in _optimizer_parts(runtime, optimizers):
        if part.main.dtype != parameter.value.dtype:
            held.append(parameter.hold("main", part.main.detach().view(-1), part.elements))
        if part.state:
            held += [parameter.hold(moment, part.state[moment].view(-1), part.elements) for moment in _MOMENTS]
            count = Piece((0,), part.step_count)
            held.append(HeldTensor(parameter.key("step"), (1,), torch.float32, (count,), parameter.is_copy))
    return held


def make_room(runtime: RankRuntime, optimizers: Mapping[str, MegatronOptimizer], *, saved: Collection[str]) -> set[str]:
    """Give optimizers that never stepped the state that the tensors named `saved` will fill.

    Parameters without saved state start afresh; returns their units.
    """
    fresh_units = set()
    for parameter, part in _optimizer_parts(runtime, optimizers):
        if not all(parameter.key(kind) in saved for kind in (*_MOMENTS, "step")):
            part.state.clear()
            fresh_units.add(parameter.unit)
        elif not part.state:
            part.state.update({moment: torch.zeros_like(part.main.detach()) for moment in _MOMENTS})
            if USING_PYTORCH_OPTIMIZER:
                part.state["step"] = torch.zeros((), dtype=torch.float32)
    return fresh_units


def adopt_group_steps(runtime: RankRuntime, optimizers: Mapping[str, MegatronOptimizer], loaded: Iterable[HeldTensor]) -> None:
    """Give loaded step counts back to optimizers that count per group (Transformer Engine's, Apex's)."""
    counts = {tensor.key: tensor.pieces[0].values for tensor in loaded}
    for parameter, part in _optimizer_parts(runtime, optimizers):
        if parameter.key("step") in counts and "step" not in part.state:
            part.group["step"] = int(counts[parameter.key("step")])


def _parameters(runtime: RankRuntime) -> Iterator[_Parameter]:
    for (unit, _), stage in runtime.stages.items():
        for name, value in stage.named_parameters():
            yield _Parameter(unit, name, value, sharding_of(stage.unit, name), stage)


def _optimizer_parts(
    runtime: RankRuntime, optimizers: Mapping[str, MegatronOptimizer]
) -> Iterator[tuple[_Parameter, _OptimizerPart]]:
    for parameter in _parameters(runtime):
        if part := _optimizer_part(optimizers.get(parameter.unit), parameter.value):
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
