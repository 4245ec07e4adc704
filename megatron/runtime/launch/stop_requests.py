"""Requests to stop a run early: SIGTERM or SIGUSR1 (a cluster's time limit or preemption), Ctrl-C, --exit-duration-in-mins.

All of these, during training, let all ranks finish the step, save, and end normally; at other times signals end the process at
once. A thread takes the signals, as the main thread may wait inside a collective, where Python handles none.
"""

import os
import signal
import threading
import time
from enum import IntEnum

from megatron.runtime.launch.failure import Ending, InterruptedRunError

_SAME_SIGNAL_SECONDS = 3.0
"""srun and torchrun both send SIGTERM to the same rank; a signal that follows this soon is not a second request."""


class StopReason(IntEnum):
    """Reasons to stop a run before its last step; if ranks have several, all take the largest."""

    NONE = 0
    JOIN = 1
    """Only to continue with nodes that have joined an elastic run."""
    DURATION = 2
    SIGUSR1 = 3
    SIGTERM = 4

    def describe(self) -> str:
        """Return the cause of the stop in words."""
        return "--exit-duration-in-mins" if self is StopReason.DURATION else self.name


_ASKING = {signal.SIGTERM: StopReason.SIGTERM, signal.SIGUSR1: StopReason.SIGUSR1}
_TAKEN = (*_ASKING, signal.SIGINT)


class StopRequests:
    """This process's signals, and the time since it began."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._start_seconds = time.monotonic()
        self._is_training = False
        self._asked_seconds: float | None = None
        self._asked_by = StopReason.NONE

    def listen(self) -> None:
        """Take SIGTERM, SIGUSR1 and SIGINT from now on; in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _TAKEN:
            signal.signal(number, lambda number, frame: None)  # for the signal to be written to the thread's pipe
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

    def begin_training(self) -> None:
        """Stop after a step from now on, since there is a state to save."""
        self._is_training = True

    def reason(self, *, exit_duration_minutes: float | None) -> StopReason:
        """Return this rank's reason to stop after the current step."""
        if self._asked_by:
            return self._asked_by
        seconds = time.monotonic() - self._start_seconds
        return StopReason.DURATION if exit_duration_minutes and seconds >= 60 * exit_duration_minutes else StopReason.NONE

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number in _TAKEN:  # other signals have their own handlers
                    self.take(signal.Signals(number))

    def take(self, number: signal.Signals) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if number in _ASKING and self._is_training:
            if self._asked_seconds is None:
                self._asked_by, self._asked_seconds = _ASKING[number], now
                return
            if now - self._asked_seconds < _SAME_SIGNAL_SECONDS:
                return
        when = "while training" if self._is_training else "before training"
        self._ending.fail(InterruptedRunError(f"ended by {number.name} {when}", exit_code=128 + number))


def ignore_in_worker() -> None:
    """Ignore signals in a forked loader process, which its training process ends."""
    signal.set_wakeup_fd(-1)
    for number in _TAKEN:  # a launcher may send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
