"""The cuts of a step's forwards, backwards and reductions into pieces."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from multimodal.values.action import Coverage, Place, SampleSubset, SegmentRange
from multimodal.values.arrays.microbatches import MicrobatchPlace
from multimodal.values.errors import ScheduleError

ReplicaKey = tuple[str, int]
"""(unit, replica)."""
StageKey = tuple[str, int, int]
"""(unit, replica, virtual stage)."""


class StageSplit(Set[Place]):
    """The places of all microbatches in some stages."""

    def __init__(self, counts: Mapping[StageKey, int]) -> None:
        self.counts = counts
        """Stage -> number of its microbatches."""

    def __contains__(self, place: object) -> bool:
        return isinstance(place, tuple) and len(place) == 4 and 0 <= place[3] < self.counts.get(place[:3], 0)

    def __iter__(self) -> Iterator[Place]:
        return (Place(*stage, microbatch) for stage, count in self.counts.items() for microbatch in range(count))

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __eq__(self, other: object) -> bool:
        return self.counts == other.counts if isinstance(other, StageSplit) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class SegmentCut:
    """The ranges of segments in which a place's forward and backward run; places that are cut alike share one value.

    Boundaries ascend and do not include the ends: (2, 7) of 10 segments gives {0:2}, {2:7}, {7:10}; without boundaries, the whole
    runs at once.
    """

    num_segments: int
    """Segments of the place's stage."""
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()

    @property
    def forwards(self) -> tuple[Coverage, ...]:
        """The ranges of the forward, in the order in which they run."""
        return _ranges(self.forward, self.num_segments)

    @property
    def backwards(self) -> tuple[Coverage, ...]:
        """The ranges of the backward, in the order in which they run: from the last segments to the first."""
        return _ranges(self.backward, self.num_segments)[::-1]


@lru_cache(maxsize=4096)
def _ranges(boundaries: tuple[int, ...], num_segments: int) -> tuple[Coverage, ...]:
    if not boundaries:
        return (None,)
    return tuple(SegmentRange(first, end) for first, end in pairwise((0, *boundaries, num_segments)))


_WHOLE: tuple[Coverage, ...] = (None,)


@dataclass(frozen=True)
class Cuts:
    """The cuts of a step's computations and reductions into pieces, and whether parameters are gathered.

    A place is cut in one way at most; raises ScheduleError if both its backward and its segments are cut.
    """

    split: Set[Place] = frozenset()
    """Places whose backward is split into an input gradient and a later weight gradient (zero bubble)."""
    num_subsets: Mapping[MicrobatchPlace, int] = field(default_factory=dict)
    """Microbatches whose backward is cut into sample subsets, in all stages alike (Entrain 4.5.3)."""
    gathers_parameters: bool = False
    """True if replicas gather a stage's updated parameters before its first forward (ZeRO-1)."""
    reduced_by_layer: frozenset[tuple[str, int]] = frozenset()
    """(unit, virtual stage) whose gradients are reduced in two pieces: all layers but the first, layer by layer during the last
    microbatch's backward, and then the first layer, whose gradients are complete last. A unit with unlike replicas has all of its
    stages here or none, and more pieces: see `StepShape.reductions`."""
    segments: Mapping[Place, SegmentCut] = field(default_factory=dict)
    """Places whose forward or backward runs in ranges of segments (Optimus, section 4.2)."""

    def __post_init__(self) -> None:
        if not self.segments or not (self.split or self.num_subsets):
            return
        for place in self.segments:
            if place in self.split or place.microbatch_place in self.num_subsets:
                other = "input and weight gradient" if place in self.split else "sample subsets"
                raise ScheduleError(
                    f"{'/'.join(map(str, place))}: cut into segments and into {other}; no microbatch of a stage can be cut in "
                    "both ways, so leave one out"
                )

    def subsets(self, microbatch: MicrobatchPlace) -> tuple[Coverage, ...]:
        """Return the sample subsets that a microbatch runs in, one entry for each of them; None: it runs as one."""
        num_subsets = self.num_subsets.get(microbatch, 0)
        return tuple(map(SampleSubset, range(num_subsets))) if num_subsets else _WHOLE

    def forwards(self, place: Place) -> tuple[Coverage, ...]:
        """Return the part that each forward of a place covers, in the order in which they run."""
        cut = self.segments.get(place)
        return cut.forwards if cut is not None else _WHOLE

    def backwards(self, place: Place) -> tuple[Coverage, ...]:
        """Return the part that each backward of a place covers, in the order in which they run (sample subsets run in any)."""
        cut = self.segments.get(place)
        return cut.backwards if cut is not None else self.subsets(place.microbatch_place)


UNCUT = Cuts()
"""One forward and one backward per microbatch and stage, one reduction per stage; parameters are not gathered."""
