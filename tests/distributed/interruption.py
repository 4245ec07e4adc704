"""Kills a process at a named point of its writing: before each change of a folder's files, and with half of a file written.

Python tells of every file that is opened to be written and of every name that changes before it happens (audit events). Bytes
have no such event: where `os.fsync` or `os.pwrite` is about to make them last, half of them are there at the point.
"""

import multiprocessing
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

END_SECONDS = 120.0
"""Only a hang lasts as long."""
_EMPTIED = "os.rmdir"
"""With a relative name in the midst of `shutil.rmtree`: the files are removed, their folder is not."""
_NAMES_CHANGE = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
Write = Callable[..., None]
"""What ranks call with their number, a function `arm` and other arguments; it calls `arm` where points begin to count."""


def run_until_killed(write: Write, arguments: tuple[object, ...], *, killed: int, point: int) -> str | None:
    """Let two forked ranks write, of which one dies at a point; returns the point's name.

    None if it came to its end before so many points.
    """
    with _two_ranks(write, arguments, rank=killed, point=point) as (ranks, told, _):
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


def keep_at_points(write: Write, arguments: tuple[object, ...], *, rank: int, keep: Callable[[int], object]) -> list[str]:
    """Let two forked ranks write to the end, and call `keep` with the number of each point of one of them, from 0.

    Meanwhile both stand still, so that the files are those which a death there would leave. Returns the names of all points.
    """
    names: list[str] = []
    with _two_ranks(write, arguments, rank=rank, point=None) as (ranks, told, go_on):
        num_ended = 0
        while num_ended < len(ranks):
            if (name := told.get()) is None:
                num_ended += 1
                continue
            other = ranks[1 - rank].pid
            os.kill(other, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(other, os.WUNTRACED)[1]), f"the other rank died before {name}"
            keep(len(names))
            names.append(name)
            os.kill(other, signal.SIGCONT)
            go_on.put(None)
    return names


@contextmanager
def _two_ranks(
    write: Write, arguments: tuple[object, ...], *, rank: int, point: int | None
) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield the processes, of which `rank` passes points, the queue of their names, in which None is the end of a rank, and the
    one that lets it go on."""
    context = multiprocessing.get_context("fork")
    told, go_on = context.SimpleQueue(), context.SimpleQueue()

    def run(number: int) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the error of a lost peer is expected
        arm = (lambda folder: _arm(folder, told, go_on, point)) if number == rank else (lambda folder: None)
        write(number, arm, *arguments)
        told.put(None)
        signal.pause()  # who ends first would break the connections of the other

    ranks = [context.Process(target=run, args=(number,), daemon=True) for number in range(2)]
    for each in ranks:
        each.start()
    try:
        yield ranks, told, go_on
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _arm(folder: Path, told: Any, go_on: Any, point: int | None) -> None:
    """Die at a point, or stand still at every one (None) until it may go on."""
    passed, lock = 0, threading.Lock()
    sync, write_at = os.fsync, os.pwrite

    def pass_point(name: str, halve: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        nonlocal passed
        with lock:  # also of threads that write in the background
            passed += 1
            if point is None or passed == point:
                with halve():
                    told.put(name)
                    if point is None:
                        go_on.get()
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR) and _is_below(values[0], folder):
            pass_point("open")
        elif event in _NAMES_CHANGE and (_is_below(values[0], folder) or (event == _EMPTIED and not os.path.isabs(values[0]))):
            pass_point(event)

    @contextmanager
    def halved(descriptor: int) -> Iterator[None]:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            yield
            return
        content = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        os.ftruncate(descriptor, found.st_size // 2)
        yield
        write_at(descriptor, content[found.st_size // 2 :], found.st_size // 2)

    def fsync(descriptor: int) -> None:
        pass_point("fsync", lambda: halved(descriptor))
        sync(descriptor)

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        def halve() -> AbstractContextManager[None]:
            write_at(descriptor, content[: len(content) // 2], position)
            return nullcontext()

        pass_point("pwrite", halve)
        return write_at(descriptor, content, position)

    os.fsync, os.pwrite = fsync, pwrite  # type: ignore[assignment]
    sys.addaudithook(hear)


def _is_below(path: Any, folder: Path) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).startswith(str(folder))
