"""The ranks that share a copy of the optimizer state, where replicas keep several copies of it (hybrid ZeRO-1).

The replicas of a unit are dealt to the copies, in order and as evenly as can be, and those of a copy share it: a copy breaks
with any rank of its replicas, and state is lost only where every copy breaks. Of a layer those share that hold the same of it:
replicas with another tensor parallel size share among themselves.
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
    """Return, by tensor parallel rank, the ranks that share the state of what they hold of a layer, ascending.

    replicas: of one copy of the state; tensor_size: that of their stages. is_tied_copy: of a last layer the copy of the first
    one's embeddings, which stages lack that hold both. Nobody, where no stage is of that size.
    """
    stages = [
        stage
        for index in replicas
        for stage in unit.replicas[index].virtual_stages
        if layer in stage.layers and unit.tensor_size(stage) == tensor_size and not (is_tied_copy and 0 in stage.layers)
    ]
    groups = [group for stage in stages for group in unit.tensor_parallel_groups(stage)]
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
    """Yield the layers of a virtual stage, in ranges with one set of holders, and who shares the state of its first rank."""
    held = unit.replicas[replica].virtual_stages[stage]
    replicas = next(each for each in replicas_of_copies(unit, num_copies) if replica in each)
    for layers in unit.shared_ranges:
        if layers.start in held.layers:
            yield layers, state_sharers(unit, layers.start, replicas=replicas, tensor_size=unit.tensor_size(held))[0]
