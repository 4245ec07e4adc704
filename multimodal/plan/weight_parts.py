"""The parts of a layer's weights whose holders reduce gradients together if the replicas of a unit are not alike.

Tensor parallel rank i of t holds the share [i / t, (i + 1) / t) of every matrix that is cut, or of each of its blocks. Replicas
of tp 2 and of tp 4 together cut at 1/4, 1/2 and 3/4: each of these four parts is held by one rank of every replica (and context
parallel rank), and these ranks reduce it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import UnitPlan, VirtualStage


class WeightPart(NamedTuple):
    """The share from `first` / `num_parts` to `end` / `num_parts` of every matrix that tensor parallel ranks cut."""

    first: int
    end: int
    num_parts: int
    ranks: tuple[int, ...]
    """The ranks that hold it, ascending."""


def holders_of_layer(unit: UnitPlan, layer: int) -> list[VirtualStage]:
    """Return the stage of every replica that holds a layer."""
    return [stage for replica in unit.replicas for stage in replica.virtual_stages if layer in stage.layers]


def holders_of_embeddings(unit: UnitPlan) -> list[VirtualStage]:
    """Return the stages that hold tied word embeddings: the first and the last of every replica."""
    return [
        stage for replica in unit.replicas for stage in dict.fromkeys((replica.virtual_stages[0], replica.virtual_stages[-1]))
    ]


def weight_parts(unit: UnitPlan, holders: Sequence[VirtualStage]) -> list[WeightPart]:
    """Cut the weights that some stages all hold wherever one of them cuts; parts ascend."""
    num_parts = lcm(*map(unit.tensor_size, holders))
    bounds = sorted({num_parts * index // size for size in map(unit.tensor_size, holders) for index in range(size + 1)})
    groups = [group for stage in holders for group in unit.tensor_parallel_groups(stage)]
    return [
        WeightPart(first, end, num_parts, tuple(sorted({group[first * len(group) // num_parts] for group in groups})))
        for first, end in pairwise(bounds)
    ]


def whole_holders(holders: Sequence[VirtualStage]) -> tuple[int, ...]:
    """Return the ranks that hold the weights that are not cut, ascending."""
    return tuple(sorted({rank for stage in holders for rank in stage.ranks}))


def reduction_groups(graph: ModelGraph, name: str, unit: UnitPlan) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of all groups in which a unit with unlike replicas reduces gradients."""
    model = graph.unit(name)
    together = [holders_of_layer(unit, each.start) for each in unit.shared_ranges if any(map(model.is_trainable, each))]
    if model.ties_embeddings and model.is_trainable(0):
        together.append(holders_of_embeddings(unit))
    for holders in together:
        yield whole_holders(holders)
        yield from (part.ranks for part in weight_parts(unit, holders))
