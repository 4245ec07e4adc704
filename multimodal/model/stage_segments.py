"""The segments of a stage: its layers' parts in one line, and where each segment begins in it, forward and backward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multimodal.model.layers.layer_kind import Exchange, LayerPart


@dataclass(frozen=True)
class StageSegments:
    """A stage's layers taken apart.

    A forward that ends with a segment stops right behind its collective, which is then under way; what is light behind it runs
    with the next segment. A backward does the same from the other side, so its bounds differ from a forward's.
    """

    parts: tuple[LayerPart, ...]
    layers: tuple[int, ...]
    """[num_parts] the layer of each part, by its index in the unit."""
    forward_starts: tuple[int, ...]
    """[num_segments + 1] the first part that a forward of each segment runs; at last, the number of parts."""
    backward_starts: tuple[int, ...]
    """[num_segments + 1] the first part, which comes last, whose backward that of each segment runs."""

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.forward_starts) - 1


def join_segments(layers: Iterable[tuple[int, tuple[tuple[LayerPart, ...], ...]]]) -> StageSegments:
    """Return the segments of a stage, of its layers' indices and the parts of each of their segments."""
    parts: list[LayerPart] = []
    layer_of_part: list[int] = []
    starts: list[int] = []
    for index, segments in layers:
        for segment in segments:
            starts.append(len(parts))
            parts += segment
            layer_of_part += [index] * len(segment)
    forward = [_after_exchange(parts, start) if start else 0 for start in starts]
    backward = [_past_light(parts, start) if start else 0 for start in starts]
    return StageSegments(tuple(parts), tuple(layer_of_part), (*forward, len(parts)), (*backward, len(parts)))


def _after_exchange(parts: Sequence[LayerPart], start: int) -> int:
    while start and parts[start - 1].is_light and parts[start - 1].exchange is Exchange.NONE:
        start -= 1
    return start


def _past_light(parts: Sequence[LayerPart], start: int) -> int:
    while parts[start].is_light:
        start += 1
    return start
