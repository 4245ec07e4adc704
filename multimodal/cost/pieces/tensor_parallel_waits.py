"""The waits of a computation for collectives of its tensor parallel ranks, numbered in the order in which they occur.

The stages of multimodal/model number them in the same way (`TensorParallelWaits` there).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from multimodal.cost.layers.layer import Exchange, Segment
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.run_options import RunOptions
from multimodal.values.action import ActionKind, SegmentRange
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import Unit

LayerNeed = tuple[str, BackwardNeed]
"""Kind of layer, and the backward that is needed of it."""


class Wait(NamedTuple):
    """One wait."""

    layer: int
    """Index of its layer in the stage."""
    segment: int
    """Index, in the stage, of the segment in which the wait occurs, or behind which it lies in this pass."""
    exchange: Exchange
    is_at_end: bool = False
    """True if it lies behind the last segment of a range, so that other work can run while the collective is under way."""

    @property
    def is_long(self) -> bool:
        """False if a product runs beside the collective."""
        return self.exchange is not Exchange.GATHER_AGAIN


class _Place(NamedTuple):
    """A segment in a stage."""

    layer: int
    segment: Segment
    need: BackwardNeed
    repeated: range = range(0)
    """In the last segment of a layer that full recomputation repeats: all segments of that layer."""
    is_scaled: bool = False
    """What is behind the segment's collective is multiplied, so that recomputation needs its result."""


def computation_waits(
    kind: ActionKind,
    layers: Sequence[LayerNeed],
    *,
    options: RunOptions,
    covers: SegmentRange | None = None,
    unit: Unit | None = None,
) -> tuple[Wait, ...]:
    """Return the waits of a stage's computation over several tensor parallel ranks, in order.

    Full recomputation repeats a layer's forward up to its last product when the backward reaches the layer: the collective
    behind that product is not needed again, and under sequence parallelism the gradient of the layer's output is gathered
    first. Layers of Transformer Engine, and those that gate its result, repeat that collective, too, and gather the gradient
    afterwards. covers: a range of the stage's segments, by default all; a range's last wait may lie behind it, and a layer is
    repeated in the range whose backward precedes that of the layer's last segment. unit: the unit of the layers, for its adapters
    and queries. O(layers).
    """
    if kind is ActionKind.WEIGHT_GRADIENT:
        return ()
    places = _places(tuple(layers), options, unit)
    first, end = (covers.first, covers.end) if covers else (0, len(places))
    if kind is ActionKind.FORWARD:
        found = _forward(places, range(first, end), is_range=end < len(places))
    else:
        is_engine = options.transformer_impl != "local" and not (unit is not None and unit.needs_local_layers)
        found = _backward(places, range(first, end), is_range=covers is not None, is_engine=is_engine and covers is None)
    return tuple(wait for wait in found if wait.exchange is Exchange.SUM or options.sequence_parallel)


@lru_cache(maxsize=256)  # asked for every range of a stage's segments
def _places(layers: tuple[LayerNeed, ...], options: RunOptions, unit: Unit | None) -> Sequence[_Place]:
    places, start, lora = list[_Place](), 0, unit.lora if unit is not None else None
    for index, (name, need) in enumerate(layers):
        kind = LAYER_KINDS.get(name)
        segments = kind.segments_in(unit) if kind else (Segment("all"),)
        repeats = kind is not None and kind.recomputes and options.recompute == "full"
        adapted = lora.modules(name) if lora is not None else ()
        *inner, (last, last_need) = _reached(segments, need, adapted) if adapted else [(each, need) for each in segments]
        places += [_Place(index, segment, own_need) for segment, own_need in inner]
        repeated = range(start, start + len(segments)) if repeats else range(0)
        places.append(_Place(index, last, last_need, repeated, kind is not None and kind.scales_branches))
        start += len(segments)
    return places


def _reached(segments: Sequence[Segment], need: BackwardNeed, adapted: Sequence[str]) -> Iterator[tuple[Segment, BackwardNeed]]:
    """Yield the segments of a layer with adapters, each with the gradients that its backward computes.

    Rows are gathered again only for adapters. If nothing upstream is trained, a backward ends at the first adapter, whose input
    has no gradient.
    """
    first = next((place for place, segment in enumerate(segments) if segment.product in adapted), 0)
    for place, segment in enumerate(segments):
        is_adapted = segment.product in adapted or len(segments) == 1
        ends = place == first and not need.sends_gradient
        kept = (each for each in segment.backward if (is_adapted if each is Exchange.GATHER_AGAIN else not ends))
        is_behind = need.sends_gradient or place >= first
        yield segment._replace(backward=tuple(kept)), need if is_behind else BackwardNeed.NONE


def _forward(places: Sequence[_Place], numbers: range, *, is_range: bool) -> Iterator[Wait]:
    for number in numbers:
        layer, segment, *_ = places[number]
        for exchange in segment.forward:
            yield Wait(layer, number, exchange)
        if segment.behind is not None:
            yield Wait(layer, number, segment.behind, is_range and number == numbers[-1])


def _backward(places: Sequence[_Place], numbers: range, *, is_range: bool, is_engine: bool) -> Iterator[Wait]:
    if numbers.stop == len(places):
        yield from _entered(places, numbers.stop, numbers.stop - 1, is_range=is_range, is_engine=is_engine)
    for number in reversed(numbers):
        layer, segment, need, *_ = places[number]
        if not need.has_backward:
            return
        for exchange in segment.backward:
            if exchange is not Exchange.GATHER_AGAIN or (need.trains_weights and not is_range):
                yield Wait(layer, number, exchange)
        if number:
            is_at_end = number == numbers.start
            yield from _entered(places, number, number, is_range=is_range, is_at_end=is_at_end, is_engine=is_engine)


def _entered(
    places: Sequence[_Place], bound: int, number: int, *, is_range: bool, is_engine: bool, is_at_end: bool = False
) -> Iterable[Wait]:
    """Return the waits of a backward between the segments `bound` and `bound - 1`; number: the segment they are counted in."""
    layer, segment, need, repeated, is_scaled = places[bound - 1]
    if not need.has_backward:
        return ()
    mirrored = [] if segment.behind is None else [Wait(layer, number, segment.behind.mirrored, is_range and is_at_end)]
    again = [wait._replace(segment=number) for wait in _forward(places, repeated, is_range=False)]
    if is_scaled or (is_engine and segment.product):  # the last product is its own, not that of experts
        return (*again, *mirrored)
    again = again[:-1] if segment.behind is not None else again
    return (*again, *mirrored) if is_range else (*mirrored, *again)
