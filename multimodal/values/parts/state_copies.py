"""The ranks that share a copy of the optimizer state, where replicas keep several copies of it (hybrid ZeRO-1).

The replicas of a unit are dealt to the copies, in order and as evenly as possible, and the replicas of a copy share it. A copy
is lost with any rank of its replicas; state is lost only if every copy is. A layer's state is shared by the ranks that hold the
same part of the layer: replicas with another tensor parallel size share among themselves.
"""

from collections.abc import Iterator

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import MOST_RANKS, UnitPlan

EVERY_REPLICA = MOST_RANKS
"""One copy per replica: each replica keeps all of the state."""


def replicas_of_copies(unit: UnitPlan, num_copies: int) -> list[range]:
    """Return the replicas of every copy of the state; there are at most as many copies as replicas."""
    count = len(unit.replicas)
    copies = min(num_copies, count)
    return [range(count * index // copies, count * (index + 1) // copies) for index in range(copies)]


def state_sharers(
    unit: UnitPlan, layer: int, *, replicas: range, tensor_size: int, is_tied_copy: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return, by tensor parallel rank, the ranks that share the state of their part of a layer, ascending.

    replicas: those of one copy of the state. tensor_size: that of the stages to look at; without such stages there are no
    sharers. is_tied_copy: take the last layer's copy of the word embeddings, which stages with the first layer lack.
    """
    held = (stage for index in replicas for stage in unit.replicas[index].virtual_stages if layer in stage.layers)
    chosen = (each for each in held if unit.tensor_size(each) == tensor_size and not (is_tied_copy and 0 in each.layers))
    groups = [group for stage in chosen for group in unit.tensor_parallel_groups(stage)]
    return tuple(tuple(sorted({group[rank] for group in groups})) for rank in range(tensor_size) if groups)


def sharing_groups(graph: ModelGraph, name: str, unit: UnitPlan, *, num_copies: int) -> Iterator[tuple[int, ...]]:
    """Yield all groups of ranks that share state."""
    layers = [(each.start, False) for each in unit.shared_ranges]
    if graph.unit(name).ties_embeddings:
        layers.append((unit.shared_ranges[-1].start, True))
    for replicas in replicas_of_copies(unit, num_copies):
        for layer, is_tied_copy in layers:
            for size in unit.tensor_sizes:
                yield from state_sharers(unit, layer, replicas=replicas, tensor_size=size, is_tied_copy=is_tied_copy)


def sharers_of_stage(unit: UnitPlan, replica: int, stage: int, *, num_copies: int) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Yield a virtual stage's layers in ranges with the same holders, and the ranks that share the state of its first rank."""
    held = unit.replicas[replica].virtual_stages[stage]
    replicas = next(each for each in replicas_of_copies(unit, num_copies) if replica in each)
    for layers in unit.shared_ranges:
        if layers.start in held.layers:
            yield layers, state_sharers(unit, layers.start, replicas=replicas, tensor_size=unit.tensor_size(held))[0]
