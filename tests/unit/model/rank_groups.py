"""Stages of a unit, on one rank or as a rank of a group that is there while layers are built, but sends nothing."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multimodal.model.initialization import initialize_parameters
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph


class GroupOfSize:
    """What layers ask of a tensor parallel group while they are built."""

    def __init__(self, size: int, *, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def groups_of(size: int) -> ProcessGroupCollection:
    """The first rank of a tensor parallel group of `size`; all other groups are this rank alone."""
    tensor, alone = GroupOfSize(size, rank=0), GroupOfSize(1, rank=0)
    return ProcessGroupCollection(tp=tensor, cp=alone, pp=alone, ep=alone, expt_tp=alone, tp_ep=alone, tp_cp=tensor)


def alone() -> ProcessGroupCollection:
    """This rank in every group; wants the fixture `world_of_one`."""
    names = ("tp", "cp", "pp", "ep", "expt_tp", "tp_ep", "tp_cp")
    return ProcessGroupCollection(**dict.fromkeys(names, dist.group.WORLD))


def build_stage(
    graph: ModelGraph, unit: str, *, layers: range | None = None, groups: Any = None, seed: int = 5, **options: Any
) -> UnitStage:
    """Build layers of a unit in float64, all of them unless some are named, on this rank alone unless groups are given."""
    layers = range(len(graph.unit(unit).layers)) if layers is None else layers
    built = BuildOptions(torch.float64, **options)
    stage = UnitStage(graph=graph, unit_name=unit, layers=layers, groups=groups or alone(), options=built, vocab_size=32)
    initialize_parameters(stage, seed=seed)
    return stage.train()


def join_shards(shards: Sequence[Tensor], sharding: ParameterSharding) -> Tensor:
    """Return the whole parameter from the parts of all tensor parallel ranks, in rank order."""
    if sharding.dimension is None:
        return shards[0]
    blocks = zip(*(shard.chunk(sharding.num_blocks, dim=sharding.dimension) for shard in shards), strict=True)
    return torch.cat([torch.cat(block, dim=sharding.dimension) for block in blocks], dim=sharding.dimension)


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations return inside, as long as any such tensor lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[int, int]] = {}
        """Storage -> (tensors, bytes)."""
        self._old: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)):
            if (storage := tensor.untyped_storage()._cdata) not in self._live:
                self._old.add(storage)
        result = function(*args, **(kwargs or {}))
        for tensor in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            self._note(tensor)
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._old:
            return
        count, size = self._live.get(storage._cdata, (0, storage.nbytes()))
        self._live[storage._cdata] = count + 1, size
        weakref.finalize(tensor, self._forget, storage._cdata)

    def _forget(self, storage: int) -> None:
        count, size = self._live.pop(storage, (1, 0))
        if count > 1:
            self._live[storage] = count - 1, size
