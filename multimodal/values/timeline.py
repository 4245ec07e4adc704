"""The timeline of a step: (action, lane, start, end), simulated or measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from multimodal.values.action import Action, ActionKind, Coverage, LayerRange, Place, SampleSubset, SegmentRange


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

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {
            "lanes": [list(ranks) for ranks in self.lanes],
            "events": [
                [[*action[:5], list(action.peer) if action.peer else None, _plain(action.covers)], *interval]
                for action, *interval in self.events
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


def _plain(covers: Coverage) -> list[int] | None:
    if isinstance(covers, SampleSubset):
        return [covers.index]
    return [covers.first, covers.end] if covers is not None else None


def _coverage(kind: ActionKind, plain: list[int] | None) -> Coverage:
    if plain is None:
        return None
    if len(plain) == 1:
        return SampleSubset(*plain)
    return LayerRange(*plain) if kind is ActionKind.REDUCE_GRADIENTS else SegmentRange(*plain)
