"""A thread that learns of failures elsewhere, so that no rank outlives the others, whatever it waits for.

Collectives end by themselves after --distributed-timeout-minutes; waiting for the store, for data or for a file system need not.
"""

import time
from threading import Event, Thread

from megatron.runtime.launch.failure import FAULTS, Ending, RanksLostError, shown_place_of_main_thread, store_keeper
from megatron.runtime.launch.meeting import Meeting

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 3.0
"""The main thread mostly notices by itself, and may have files to close."""
_MARGIN_SECONDS = 5.0


class RankWatch:
    """Watches from `start` to `stop`."""

    def __init__(self, meeting: Meeting, *, ending: Ending, timeout_seconds: float) -> None:
        """timeout_seconds: a store that does not answer for so long is taken for gone."""
        self._meeting, self._ending = meeting, ending
        self._patience_seconds = timeout_seconds + _MARGIN_SECONDS
        self._stopped = Event()
        self._num_answers = 0

    def start(self) -> None:
        """Begin; ranks without peers have nothing to watch."""
        if self._meeting.place.size > 1:
            for watch in (self._watch_others, self._watch_store):
                Thread(target=watch, daemon=True).start()

    def stop(self) -> None:
        """The run is over: from now on others may leave."""
        self._stopped.set()

    def _watch_others(self) -> None:
        has_answered = False
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                if (exit_code := self._meeting.failure()) is not None:
                    self._end_after_grace(exit_code)
                if not has_answered and self._meeting.roll_is_called():
                    self._meeting.answer_roll(shown_place_of_main_thread())
                    has_answered = True
            except RuntimeError:
                if not self._stopped.wait(1.0):
                    self._end_without_store("lost its connection to")
                return
            self._num_answers += 1

    def _watch_store(self) -> None:
        """Counts ticks rather than looking at a clock, which runs on while this process itself is frozen."""
        seen, silent_seconds = -1, 0.0
        while not self._stopped.wait(1.0):
            silent_seconds = 0.0 if self._num_answers != seen else silent_seconds + 1.0
            seen = self._num_answers
            if silent_seconds > self._patience_seconds:
                self._end_without_store(f"waited {silent_seconds:.0f} s for")

    def _end_after_grace(self, exit_code: int) -> None:
        time.sleep(_GRACE_SECONDS)
        self._ending.follow(exit_code)

    def _end_without_store(self, happened: str) -> None:
        place = self._meeting.place
        self._ending.fail(RanksLostError(f"rank {place.rank} {happened} {store_keeper(place)} {FAULTS}"))
