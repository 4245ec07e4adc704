"""Stages of a unit, on one rank or as a rank of a group that is there while layers are built, but sends nothing."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from multimodal.model.initialization import initialize_parameters
from multimodal.model.transformer_config import BuildOptions, Precision
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


def groups_of(size: int, *, rank: int = 0) -> ProcessGroupCollection:
    """Rank `rank` of a tensor parallel group of `size`; all other groups are this rank alone."""
    tensor, alone = GroupOfSize(size, rank=rank), GroupOfSize(1, rank=0)
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
    built = BuildOptions(Precision(torch.float64), **options)
    stage = UnitStage(graph=graph, unit_name=unit, layers=layers, groups=groups or alone(), options=built, vocab_size=32)
    initialize_parameters(stage, seed=seed)
    return stage.train()
