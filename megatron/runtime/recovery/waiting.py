"""Finds out if a thread waits for another process, and if it makes no progress in that wait."""

import linecache
import os
import sys
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

_SIGNS_OF_WAITING = (".wait(", "synchronize(")
_ASLEEP = "S"
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Indices in /proc/self/task/N/stat after the thread's name."""


class Standstill(NamedTuple):
    """A thread's position in a wait and its processor time; if both stay the same, it has done nothing in between."""

    frame: int
    instruction: int
    num_ticks: int


def is_waiting(thread: Thread) -> bool:
    """Return True if a thread waits for another process, judging by its current line."""
    frame = sys._current_frames().get(thread.ident or 0)  # without its callers: Python 3.11 may crash over them
    if frame is None:
        return False
    path = frame.f_code.co_filename
    return f"{os.sep}distributed{os.sep}" in path or any(
        sign in linecache.getline(path, frame.f_lineno) for sign in _SIGNS_OF_WAITING
    )


def find_standstill(thread: Thread) -> Standstill | None:
    """Return the position of a thread that waits for another process; None if it computes, or waits for something else."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not is_waiting(thread):
        return None
    with suppress(OSError):  # it has ended
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[_STATE] == _ASLEEP:
            return Standstill(id(frame), frame.f_lasti, int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]))
    return None
