"""The segments of a stage: its layers' parts in one list, and the start of each segment in it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multimodal.model.layers.layer_kind import Exchange, LayerPart


@dataclass(frozen=True)
class StageSegments:
    """The parts of a stage's layers.

    A forward that ends with a segment stops right behind its collective, which is then under way; parts behind the collective (a
    residual sum) run with the next segment. A backward stops at the same places, so its collectives are under way there, too.
    """

    parts: tuple[LayerPart, ...]
    layers: tuple[int, ...]
    """[num_parts] the layer of each part, by its index in the unit."""
    starts: tuple[int, ...]
    """[num_segments + 1] the first part of each segment, then the number of parts."""

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.starts) - 1


def join_segments(layers: Iterable[tuple[int, tuple[tuple[LayerPart, ...], ...]]]) -> StageSegments:
    """Return the segments of a stage; layers: indices of its layers, and the parts of each of their segments."""
    parts: list[LayerPart] = []
    layer_of_part: list[int] = []
    starts, num_behind = [], 0
    for index, segments in layers:
        for segment in segments:
            starts.append(len(parts) - num_behind)
            num_behind = _num_behind_collective(segment)
            parts += segment
            layer_of_part += [index] * len(segment)
    return StageSegments(tuple(parts), tuple(layer_of_part), (*starts, len(parts)))


def _num_behind_collective(segment: Sequence[LayerPart]) -> int:
    """Return the number of a segment's parts behind its last collective; 0 if it has none."""
    ends = [index + 1 for index, part in enumerate(segment) if part.exchange is not Exchange.NONE]
    return len(segment) - ends[-1] if ends else 0
