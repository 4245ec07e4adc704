"""Kills a process at a named point of its writing: before each change of a folder's files, and with half of a file written.

Python tells of every file that is opened to be written and of every name that changes before it happens (audit events). Bytes
have no such event: where `os.fsync` or `os.pwrite` is about to make them last, half of them are there when the process dies.
"""

import multiprocessing
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

END_SECONDS = 120.0
"""Only a hang lasts as long."""
_EMPTIED = "os.rmdir"
"""With a relative name in the midst of `shutil.rmtree`: the files are removed, their folder is not."""
_NAMES_CHANGE = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def run_until_killed(write: Callable[..., None], arguments: tuple[object, ...], *, killed: int, point: int) -> str | None:
    """Let two forked ranks call `write(rank, arm, *arguments)`, of which one dies at a point; returns the point's name.

    `write` calls `arm` where points begin to count. None if it came to its end before so many points.
    """
    context = multiprocessing.get_context("fork")
    told: Any = context.SimpleQueue()
    ranks = [
        context.Process(target=_run, args=(write, rank, arguments, told, point if rank == killed else None), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        name: str | None = told.get()
        if name is None:
            assert told.get() is None, "a rank dies, but not at a point"
            return None
        for rank in ranks:
            rank.join(END_SECONDS)
        codes = [rank.exitcode for rank in ranks]
        assert codes[killed] == -signal.SIGKILL, f"{name}: {codes}"
        assert codes[1 - killed] not in (0, None), f"{name}: the rank that is left goes on, or hangs: {codes}"
        return name
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _run(write: Callable[..., None], rank: int, arguments: tuple[object, ...], told: Any, point: int | None) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the error of a lost peer is expected
    write(rank, lambda folder: _arm(folder, told, point), *arguments)
    told.put(None)
    signal.pause()  # who ends first would break the connections of the other


def _arm(folder: Path, told: Any, point: int | None) -> None:
    if point is None:
        return
    passed, lock = 0, threading.Lock()
    sync, write_at = os.fsync, os.pwrite

    def pass_point(name: str, halve: Callable[[], object] = lambda: None) -> None:
        nonlocal passed
        with lock:  # also of threads that write in the background
            passed += 1
            if passed == point:
                halve()
                told.put(name)
                os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR) and _is_below(values[0], folder):
            pass_point("open")
        elif event in _NAMES_CHANGE and (_is_below(values[0], folder) or (event == _EMPTIED and not os.path.isabs(values[0]))):
            pass_point(event)

    def fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        is_file = stat.S_ISREG(found.st_mode)
        pass_point("fsync", lambda: os.ftruncate(descriptor, found.st_size // 2) if is_file else None)
        sync(descriptor)

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        pass_point("pwrite", lambda: write_at(descriptor, content[: len(content) // 2], position))
        return write_at(descriptor, content, position)

    os.fsync, os.pwrite = fsync, pwrite  # type: ignore[assignment]
    sys.addaudithook(hear)


def _is_below(path: Any, folder: Path) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).startswith(str(folder))
