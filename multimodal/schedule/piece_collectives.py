"""Tensor parallel collectives in and behind pieces of work, which determine the pieces that may run inside others."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from multimodal.cost.pieces.tensor_parallel_waits import Wait, computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.values.action import Action, SegmentRange
from multimodal.values.arrays.rows import Bools, Integers
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import StepWork

MOST_COLLECTIVES = RunOptions(transformer_impl="local", recompute="full", sequence_parallel=True)
"""Options of a run whose layers have every possible collective."""


class PieceCollectives(NamedTuple):
    """Facts of pieces; columns of one length."""

    fits_inside: Bools
    """True if the piece itself waits for no collective."""
    ends_with_one: Bools
    """True if a collective follows the piece, for which the pieces that continue it wait."""

    @classmethod
    def of(cls, work: StepWork, pieces: Integers, *, options: RunOptions) -> "PieceCollectives":
        """Find the collectives of pieces. O(pieces log pieces)."""
        plans = [work.plan.units[name] for name in work.pieces.units]
        sizes = [max(plan.tensor_sizes) * plan.context_parallel_size for plan in plans]
        fits, ends = np.ones(len(pieces), bool), np.zeros(len(pieces), bool)
        stages, (firsts, lasts) = work.computed_stages[pieces], work.pieces.segment_bounds
        units, indices = work.pieces.unit_of_stage[stages], work.pieces.index_of_stage[stages]
        shared = np.flatnonzero(np.array(sizes)[units] > 1)
        replicas = np.where(np.array([plan.is_unlike for plan in plans])[units], work.replicas[pieces], 0)  # others are alike
        columns = (units, indices, replicas, work.kinds[pieces].astype(np.int64), firsts[pieces], lasts[pieces])
        keys = _as_one_number([each[shared] for each in columns])
        _, examples, which = np.unique(keys, return_index=True, return_inverse=True)
        layers = StageLayers(work.graph, work.plan, vocab_size=0)
        for number, example in enumerate(examples.tolist()):
            action = work.action(int(pieces[shared[example]]))
            alike = shared[which.ravel() == number]
            waits = own_waits(action, layers, options=options)
            ends[alike] = bool(waits) and waits[-1].is_at_end
            fits[alike] = work.plan.units[action.unit].context_parallel_size == 1 and all(wait.is_at_end for wait in waits)
        return cls(fits, ends)


def own_waits(action: Action, layers: StageLayers, *, options: RunOptions) -> tuple[Wait, ...]:
    """Return the waits of a computation, or of its range of segments, for its own tensor parallel ranks."""
    if layers.tensor_size(action[1:4]) == 1:
        return ()
    covers = action.covers if isinstance(action.covers, SegmentRange) else None
    unit = layers.graph.unit(action.unit)
    return computation_waits(action.kind, layers.in_order(action[1:4]), options=options, covers=covers, unit=unit)


def shared_encoders(shape: StepShape) -> Iterator[str]:
    """Yield the encoders whose ranges of segments may run inside other computations: those whose tokens no ranks share."""
    for unit in shape.graph.encoders:
        if shape.plan.units[unit.name].context_parallel_size == 1:
            yield unit.name


def _as_one_number(columns: Sequence[Integers]) -> Integers:
    found = np.zeros_like(columns[0])
    for column in columns:
        found = found * (2 + column.max(initial=0)) + column + 1  # values are -1 or more
    return found
