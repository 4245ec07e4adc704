"""Notices a store that answers nobody, since its process is frozen."""

from collections.abc import Callable
from threading import Event


class StoreWatch:
    """Counts the store's answers to requests that one thread repeats; another one runs `watch`."""

    def __init__(self, patience_seconds: float, *, stopped: Event, end: Callable[[float], object]) -> None:
        """end: called with the seconds waited when no answer has come for longer than patience_seconds."""
        self._patience_seconds, self._stopped, self._end = patience_seconds, stopped, end
        self._num_answers = 0

    def note_answer(self) -> None:
        """Count an answer."""
        self._num_answers += 1

    def watch(self) -> None:
        """Watch until stopped, counting ticks instead of reading a clock, which continues while this process itself is frozen."""
        seen, silent_seconds = -1, 0.0
        while not self._stopped.wait(1.0):
            silent_seconds = 0.0 if self._num_answers != seen else silent_seconds + 1.0
            seen = self._num_answers
            if silent_seconds > self._patience_seconds:
                self._end(silent_seconds)
                return
