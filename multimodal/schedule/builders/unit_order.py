"""The order of a unit's actions in each of its stages, from a closed form over chunks and microbatches."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from multimodal.values.arrays.rows import Integers
from multimodal.values.parts.cuts import StageKey
from multimodal.values.plan import Replica
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import StepWork


class Order(NamedTuple):
    """The actions of one physical stage, as columns."""

    kinds: Integers
    """`KIND_NUMBERS`."""
    chunks: Integers
    """Indices among the stage's layer ranges, counted from upstream."""
    microbatches: Integers


def num_chunks(replica: Replica) -> int:
    """Return the layer ranges per stage if all stages have equally many; else 0."""
    counts = {len(stage.layer_ranges) for stage in replica.stages}
    return counts.pop() if len(counts) == 1 else 0


def chunk_stages(replica: Replica) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages that each physical stage holds, upstream first."""
    held: list[list[int]] = [[] for _ in replica.stages]
    for stage in replica.virtual_stages:
        held[stage.stage_index].append(stage.index)
    return tuple(map(tuple, held))


def stages_that_share(
    name: str, shape: StepShape, *, has_order: Callable[[Replica], bool]
) -> Iterator[tuple[list[StageKey], Replica, int]]:
    """Yield the layer ranges of each physical stage that have a backward, if several have, with its replica and its index.

    They share a limit in flight; ranges without a backward keep nothing, and have limits of their own. has_order: see
    `ordered_pieces`.
    """
    for replica, each in enumerate(shape.plan.units[name].replicas):
        for stage_index, held in enumerate(chunk_stages(each) if has_order(each) else ()):
            stages = [(name, replica, stage) for stage in held if shape.backward_need(name, replica, stage).has_backward]
            if len(stages) > 1:
                yield stages, each, stage_index


def ordered_pieces(
    name: str, work: StepWork, *, has_order: Callable[[Replica], bool], orders_of: Callable[[int, int, int, int], Iterable[Order]]
) -> list[Integers]:
    """Return the pieces of each order of a unit's physical stages; actions that a stage does not have (frozen) are left out.

    has_order: False for replicas whose stages keep no such order; orders_of: the orders of a stage, from its index and the
    numbers of stages, chunks and microbatches.
    """
    counts = work.pieces.units[name].counted.counts.tolist()
    orders = [
        (order, replica, held)
        for replica, each in enumerate(work.plan.units[name].replicas)
        for stage_index, held in enumerate(chunk_stages(each) if has_order(each) else ())
        for order in orders_of(stage_index, len(each.stages), num_chunks(each), counts[replica])
    ]
    if not orders:
        return []
    columns = [(order.kinds, np.array(held)[order.chunks], order.microbatches) for order, _, held in orders]
    kinds, stages, microbatches = map(np.concatenate, zip(*columns, strict=True))
    sizes = [len(order.kinds) for order, _, _ in orders]
    replicas = np.repeat([replica for _, replica, _ in orders], sizes)
    found = work.pieces.find(name, kinds=kinds, replicas=replicas, stages=stages, microbatches=microbatches)
    return [pieces[pieces >= 0] for pieces in np.split(found, np.cumsum(sizes)[:-1])]
