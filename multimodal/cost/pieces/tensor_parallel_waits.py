"""The waits of a computation for collectives of its tensor parallel ranks, numbered as the computation comes to them.

The stages of multimodal/model count the same (`TensorParallelWaits` there).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.layers.segments import Exchange, Segment
from multimodal.cost.run_options import RunOptions
from multimodal.values.action import ActionKind, SegmentRange
from multimodal.values.backward_need import BackwardNeed

LayerNeed = tuple[str, BackwardNeed]
"""Kind of layer, and the backward that it needs."""


class Wait(NamedTuple):
    """One wait."""

    layer: int
    """Its layer's place in the stage."""
    segment: int
    """Its segment's number in the stage."""
    exchange: Exchange

    @property
    def is_at_end(self) -> bool:
        """True if nothing is left of the segment but what is light."""
        return self.exchange is Exchange.SUM

    @property
    def is_long(self) -> bool:
        """False where a product runs beside the collective."""
        return self.exchange is not Exchange.GATHER_AGAIN


def computation_waits(
    kind: ActionKind, layers: Sequence[LayerNeed], *, options: RunOptions, covers: SegmentRange | None = None
) -> tuple[Wait, ...]:
    """Return the waits of a stage's computation over several tensor parallel ranks, in order.

    Full recomputation repeats a layer's forward up to its last product, once the backward has come to that: the collective
    behind it is not needed again, and under sequence parallelism the gradient of the layer's output is gathered first. Of the
    options, sequence parallelism and recomputation decide. covers: a range of the stage's segments; by default all. O(layers).
    """
    if kind is ActionKind.WEIGHT_GRADIENT:
        return ()
    first = 0
    found: list[Wait] = []
    for index, (name, need) in enumerate(layers):
        segments = LAYER_KINDS[name].segments if name in LAYER_KINDS else (Segment("all"),)
        covered = [
            (first + place, segment)
            for place, segment in enumerate(segments)
            if covers is None or covers.first <= first + place < covers.end
        ]
        first += len(segments)
        if kind is ActionKind.FORWARD:
            found += _forward(index, covered, options)
        elif need.has_backward:
            repeats = options.recompute == "full" and name in LAYER_KINDS and LAYER_KINDS[name].recomputes
            repeated = list(_forward(index, covered, options)) if repeats else []
            own = list(_backward(index, covered, options, regathers=covers is None and need.trains_weights))
            before = 1 if repeated and covers is None and options.sequence_parallel else 0
            repeated = repeated[:-1] if repeated and repeated[-1].segment == first - 1 else repeated
            found[:0] = [*own[:before], *repeated, *own[before:]]
    return tuple(found)


def _forward(layer: int, segments: Sequence[tuple[int, Segment]], options: RunOptions) -> Iterator[Wait]:
    for number, segment in segments:
        for exchange in segment.forward:
            if exchange is Exchange.SUM or options.sequence_parallel:
                yield Wait(layer, number, exchange)


def _backward(layer: int, segments: Sequence[tuple[int, Segment]], options: RunOptions, *, regathers: bool) -> Iterator[Wait]:
    for number, segment in reversed(segments):
        for exchange in segment.backward:
            is_made = exchange is not Exchange.GATHER_AGAIN or regathers
            if exchange is Exchange.SUM or (options.sequence_parallel and is_made):
                yield Wait(layer, number, exchange)
