"""The timeline of a step: (action, lane, start, end), simulated or measured."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from multimodal.values.action import Action, ActionKind, Coverage, LayerRange, Place, Resource, SampleSubset, SegmentRange


class TimelineEvent(NamedTuple):
    """The interval of one action. For a receive it is the time for which the lane waited."""

    action: Action
    lane: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """All events of one step; seconds count from the step's start."""

    lanes: tuple[tuple[int, ...], ...]
    """Ranks of each lane."""
    events: tuple[TimelineEvent, ...]

    @property
    def duration_seconds(self) -> float:
        """Seconds from the step's start to the last event's end."""
        return max((event.end_seconds for event in self.events), default=0.0)

    @property
    def computing_seconds(self) -> float:
        """Seconds of all computations, over all lanes."""
        computed = (each for each in self.events if each.action.kind.resource is Resource.COMPUTE)
        return sum(event.end_seconds - event.start_seconds for event in computed)

    def scaled(self, factor: float) -> "Timeline":
        """Return the timeline with all times multiplied."""
        events = (TimelineEvent(action, lane, factor * start, factor * end) for action, lane, start, end in self.events)
        return Timeline(self.lanes, tuple(events))

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {
            "lanes": [list(ranks) for ranks in self.lanes],
            "events": [
                [[*place, peer and list(peer), covers and list(astuple(covers))], *interval]
                for (*place, peer, covers), *interval in self.events
            ],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Timeline":
        """Build from the plain form."""
        return cls(
            tuple(tuple(ranks) for ranks in value["lanes"]),
            tuple(
                TimelineEvent(Action._make((kind, *place, peer and Place(*peer), _coverage(kind, covers))), *interval)
                for (name, *place, peer, covers), *interval in value["events"]
                for kind in [ActionKind(name)]
            ),
        )


def _coverage(kind: ActionKind, plain: list[int] | None) -> Coverage:
    if plain is None:
        return None
    if len(plain) == 1:
        return SampleSubset(*plain)
    return LayerRange(*plain) if kind is ActionKind.REDUCE_GRADIENTS else SegmentRange(*plain)
