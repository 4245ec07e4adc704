"""Fits work into the idle time of lanes: csrc/fill_idle_lanes.cpp, step by step."""

from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multimodal.references.event_core import EventRun, rows_of

_NONE = -1


def fill_idle_lanes(
    *, tolerances: NDArray[np.int64], **arrays: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Return all pieces by their start, the piece and the wait in which each runs, and the earliest end over the tolerances.

    arrays: `LanesToFill` of schedule/fill_idle_lanes.py.
    """
    lists = {name: array.tolist() for name, array in arrays.items()}
    runs = [_Run(lists, tolerance) for tolerance in tolerances.tolist()]
    for each in runs:
        each.run_events()
    run = min(runs, key=lambda each: each.last_end)
    return np.array(run.order, np.int64), np.array(run.carriers, np.int64), np.array(run.inside_waits, np.int64), run.last_end


class _Run(EventRun[int]):
    """The state of one run: the clock, the pieces that have begun, and the open needs of each piece."""

    def __init__(self, arrays: dict[str, list[int]], tolerance: int) -> None:
        super().__init__(0)
        self.tolerance, self.durations, self.goes_inside = tolerance, arrays["durations"], arrays["goes_inside"]
        self.holders, self.releases, self.limits = arrays["holders"], arrays["releases"], arrays["limits"]
        self.behind = arrays["behind"]
        self.lanes = rows_of(arrays["lane_starts"], arrays["lanes"])
        self.line = rows_of(arrays["line_starts"], arrays["line"])
        self.queues = rows_of(arrays["queue_starts"], arrays["queues"])
        self.waits = rows_of(arrays["wait_starts"], arrays["waits"])
        needs, delays = (rows_of(arrays["need_starts"], arrays[name]) for name in ("needs", "delays"))
        self.needs = [list(zip(*rows, strict=True)) for rows in zip(needs, delays, strict=True)]
        self.num_kept = [0] * len(self.limits)
        num_pieces = len(self.durations)
        self.inside_durations = [duration - each for duration, each in zip(self.durations, self.behind, strict=True)]
        self.carriers, self.inside_waits = [_NONE] * num_pieces, [_NONE] * num_pieces
        self.is_filler = [False] * num_pieces
        for piece in chain.from_iterable(self.queues):
            self.is_filler[piece] = True
        self.before: list[list[int]] = [[] for _ in range(num_pieces)]
        for earlier, later in chain.from_iterable(map(pairwise, self.line)):
            self.before[later].append(earlier)
        self.users: list[list[tuple[int, int]]] = [[] for _ in range(num_pieces)]
        for piece, rows in enumerate(self.needs):
            for need, delay in rows:
                self.users[need].append((piece, delay))
        self.tails = self._measure_tails()
        self.num_missing = list(map(len, self.needs))
        self.arrived_at = [0] * num_pieces
        self.ended_at = [_NONE] * num_pieces
        self.free_at = [0] * len(self.line)
        self.line_heads, self.queue_heads = [0] * len(self.line), [0] * len(self.queues)
        self.expected: dict[int, int] = {}
        self.order: list[int] = []
        self.last_end = 0

    def start(self) -> bool:
        if len(self.order) == len(self.durations):
            return False
        self.expected.clear()
        while self._begin_filler() or self._begin_line():
            pass
        return True

    def force(self) -> bool:
        """Let the most urgent filler go on although it does not fit, one whose holder is full only if there is no other."""
        return self._begin_filler(must_fit=False) or self._begin_filler(must_fit=False, needs_room=False)

    def _measure_tails(self) -> list[int]:
        """Return the longest path from each piece's start to the end of all work, over needs and the lanes' orders."""
        num_users = list(map(len, self.users))
        for earlier in (earlier for row in self.before for earlier in row):
            num_users[earlier] += 1
        ready = [piece for piece, count in enumerate(num_users) if count == 0]
        tails = [0] * len(num_users)
        while ready:
            piece = ready.pop()
            tails[piece] += self.durations[piece]
            for earlier, delay in (*self.needs[piece], *((each, 0) for each in self.before[piece])):
                tails[earlier] = max(tails[earlier], delay + tails[piece])
                num_users[earlier] -= 1
                if num_users[earlier] == 0:
                    ready.append(earlier)
        return tails

    def _line_head(self, lane: int) -> int:
        return self.line[lane][self.line_heads[lane]] if self.line_heads[lane] < len(self.line[lane]) else _NONE

    def _is_ready(self, piece: int) -> bool:
        is_met = self.num_missing[piece] == 0 and self.arrived_at[piece] <= self.now
        return is_met and all(self.free_at[lane] <= self.now for lane in self.lanes[piece])

    def _urgency(self, piece: int) -> tuple[int, int]:
        return -self.tails[piece], piece

    def _has_room(self, piece: int) -> bool:
        holder = self.holders[piece]
        return holder < 0 or self.num_kept[holder] < self.limits[holder]

    def _fillers(self) -> dict[int, int]:
        """Return the next filler of each queue, with the queue."""
        positions = enumerate(zip(self.queues, self.queue_heads, strict=True))
        return {rows[head]: queue for queue, (rows, head) in positions if head < len(rows)}

    def _begin_filler(self, *, must_fit: bool = True, needs_room: bool = True) -> bool:
        heads = self._fillers()
        for piece in sorted(heads, key=self._urgency):
            has_room = not needs_room or self._has_room(piece)
            if self._is_ready(piece) and has_room and (not must_fit or self._fits(piece)):
                self.queue_heads[heads[piece]] += 1
                self._begin(piece)
                return True
        return False

    def _begin_line(self) -> bool:
        heads = {self._line_head(lane) for lane in range(len(self.line))} - {_NONE}
        for piece in sorted(heads, key=self._urgency):
            if self._is_ready(piece) and all(self._line_head(lane) == piece for lane in self.lanes[piece]):
                for lane in self.lanes[piece]:
                    self.line_heads[lane] += 1
                self._begin(piece, self._fill_waits(piece))
                return True
        return False

    def _fill_waits(self, carrier: int) -> int:
        """Put ready fillers into the waits of a piece that is about to begin, the most urgent first, as far as they fit.

        Returns the time by which the piece gets longer.
        """
        inside: list[int] = []
        waits, added = self.waits[carrier], 0
        interval = max(0, self.durations[carrier] - sum(waits)) // (len(waits) + 1)
        for wait, seconds in enumerate(waits):
            left, started = dict.fromkeys(self.lanes[carrier], seconds), dict.fromkeys(self.lanes[carrier], 0)
            while (queue := self._next_inside(carrier, wait, left)) != _NONE:
                piece = self.queues[queue][self.queue_heads[queue]]
                self.queue_heads[queue] += 1
                for lane in self.lanes[piece]:
                    left[lane] -= self.inside_durations[piece]
                    started[lane] += self.behind[piece]
                self.carriers[piece], self.inside_waits[piece] = carrier, wait
                self._keep_and_release(piece)
                inside.append(piece)
            added += max(0, -min(left.values())) + max(0, max(started.values()) - interval)
        for piece in inside:
            self._end_at(piece, self.now + self.durations[carrier] + added)
        return added

    def _next_inside(self, carrier: int, wait: int, left: dict[int, int]) -> int:
        """Return the queue with the most urgent head that can run in the rest of a carrier's wait, in its lanes."""
        heads = self._fillers()
        for piece in sorted(heads, key=self._urgency):
            needed = (100 - self.tolerance) * self.inside_durations[piece]
            fits = all(left.get(lane, 0) > 0 and needed <= 100 * left[lane] for lane in self.lanes[piece])
            if self.goes_inside[piece] and fits and self._has_room(piece) and self._can_go_inside(piece, carrier, wait):
                return heads[piece]
        return _NONE

    def _can_go_inside(self, piece: int, carrier: int, wait: int) -> bool:
        """Return True if all its needs are met, or run before it inside the same piece in the same lanes.

        A need that ends with a collective must be in an earlier wait.
        """
        for need, delay in self.needs[piece]:
            is_met = self.ended_at[need] != _NONE and self.ended_at[need] + delay <= self.now
            is_beside = self.carriers[need] == carrier and self.lanes[need] == self.lanes[piece]
            if not is_met and not (is_beside and (self.goes_inside[need] < 2 or self.inside_waits[need] < wait)):
                return False
        return True

    def _fits(self, piece: int) -> bool:
        for lane in self.lanes[piece]:
            head = self._line_head(lane)
            if head == _NONE or self.tails[piece] > self.tails[head]:
                continue
            idle = self._expected_start(head) - self.now
            if idle <= 0 or (100 - self.tolerance) * self.durations[piece] > 100 * idle:
                return False
        return True

    def _expected_start(self, piece: int) -> int:
        """Return the time at which a piece that keeps its order could start if no further filler began."""
        stack = [piece]
        while stack:
            top = stack[-1]
            start = max([self.now, *(self.free_at[lane] for lane in self.lanes[top])])
            open_ends = []
            for earlier, delay in (*self.needs[top], *((each, 0) for each in self.before[top])):
                if self.ended_at[earlier] != _NONE:
                    start = max(start, self.ended_at[earlier] + delay)
                elif earlier in self.expected:
                    start = max(start, self.expected[earlier] + self.durations[earlier] + delay)
                elif not self.is_filler[earlier]:
                    open_ends.append(earlier)
            if open_ends:
                stack += open_ends
            else:
                self.expected[stack.pop()] = start
        return self.expected[piece]

    def _begin(self, piece: int, added: int = 0) -> None:
        end = self.now + self.durations[piece] + added
        for lane in self.lanes[piece]:
            self.free_at[lane] = end
        self._keep_and_release(piece)
        self._end_at(piece, end)

    def _keep_and_release(self, piece: int) -> None:
        if self.holders[piece] != _NONE:
            self.num_kept[self.holders[piece]] += 1
        if self.releases[piece] != _NONE:
            self.num_kept[self.releases[piece]] -= 1

    def _end_at(self, piece: int, end: int) -> None:
        self.ended_at[piece] = end
        self.order.append(piece)
        self.last_end = max(self.last_end, end)
        self.add(end, piece)
        for user, delay in self.users[piece]:
            self.num_missing[user] -= 1
            self.arrived_at[user] = max(self.arrived_at[user], end + delay)
            self.add(end + delay, user)
        self.expected.clear()
