"""What became of a schedule that was run lane by lane."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multimodal.schedule.event_arrays import Floats, Integers
from multimodal.values.schedule import Action, Schedule
from multimodal.values.timeline import TimelineEvent


@dataclass(frozen=True)
class Execution:
    """What ran, and where the lanes stand. Events are kept as columns, by start: most who ask want only some of them."""

    actions: Sequence[Action]
    """What a number in `event_actions` or `done_actions` stands for."""
    event_actions: Integers
    event_lanes: Integers
    start_seconds: Floats
    end_seconds: Floats
    positions: tuple[int, ...]
    """Per lane the index of the first action that could not run; the number of its actions when all did."""
    done_actions: Integers
    """Numbers of all actions that are complete."""

    @classmethod
    def of_events(cls, events: Sequence[TimelineEvent], *, positions: Sequence[int], done: Iterable[Action]) -> "Execution":
        """Number the actions of events that are sorted by start."""
        done_actions = tuple(done)
        numbers = {action: number for number, action in enumerate(done_actions)}
        return cls(
            done_actions,
            np.array([numbers[event.action] for event in events], np.int64),
            np.array([event.lane for event in events], np.int64),
            np.array([event.start_seconds for event in events], np.float64),
            np.array([event.end_seconds for event in events], np.float64),
            tuple(positions),
            np.arange(len(done_actions)),
        )

    @cached_property
    def events(self) -> tuple[TimelineEvent, ...]:
        """Computations and collectives, by start; nothing of zero length."""
        columns = (self.event_lanes, self.start_seconds, self.end_seconds)
        actions = map(self.actions.__getitem__, self.event_actions.tolist())
        return tuple(map(TimelineEvent, actions, *(column.tolist() for column in columns)))

    @cached_property
    def done(self) -> frozenset[Action]:
        """All actions that are complete."""
        return frozenset(map(self.actions.__getitem__, self.done_actions.tolist()))

    @property
    def duration_seconds(self) -> float:
        """From the start to the end of the last event."""
        return float(self.end_seconds.max(initial=0.0))

    def stuck(self, schedule: Schedule) -> dict[int, int]:
        """Position of every lane that did not come to its end; empty when the schedule finished."""
        lengths = [len(lane.actions) for lane in schedule.lanes]
        return {lane: position for lane, position in enumerate(self.positions) if position < lengths[lane]}
