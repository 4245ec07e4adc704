"""Ranges of bytes of remote files, kept in a folder of this machine that its processes share, up to a number of bytes."""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_TOTAL = "total"
"""The file with the bytes that are kept, which is locked while one process adds to them."""
_SMALLEST = 4096
"""Bytes that a file takes on a disk, however short it is."""
_KEPT_SHARE = 0.75
"""Share of the bytes that stays when room is made: those that were used last."""


class ByteCache:
    """Keeps bytes under keys; what cannot be kept is no error."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        """folder: on a local disk, made when it is needed; most_bytes: 0 keeps nothing."""
        self._folder, self._most_bytes = folder, most_bytes

    def get(self, key: str, *, size: int) -> bytes | None:
        """Return the bytes of a key, or None if they are not kept as a whole."""
        if not self._most_bytes:
            return None
        with suppress(OSError):
            path = self._folder / key[:2] / key
            content = path.read_bytes()
            if len(content) == size:  # else the machine has stopped while it was written
                os.utime(path)
                return content
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keep bytes, in place of those that were used longest ago."""
        cost, path = max(_SMALLEST, len(content)), self._folder / key[:2] / key
        if cost > self._most_bytes * (1 - _KEPT_SHARE):
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / _TOTAL).open("a+b") as told:
                fcntl.flock(told, fcntl.LOCK_EX)
                told.seek(0)
                total = (int(found) if (found := told.read()).isdigit() else self._most_bytes) + cost  # else it is counted anew
                if total > self._most_bytes:
                    total = self._make_room() + cost
                told.truncate(0)
                told.write(b"%d" % total)
                told.flush()
                write_whole(path, content)

    def _make_room(self) -> int:
        """Remove files, oldest first; returns the bytes of those that are left."""
        found = [entry for folder in os.scandir(self._folder) if folder.is_dir() for entry in os.scandir(folder)]
        aged = sorted((entry.stat().st_mtime_ns, max(_SMALLEST, entry.stat().st_size), entry.path) for entry in found)
        total = sum(size for _, size, _ in aged)
        for _, size, path in aged:
            if total <= self._most_bytes * _KEPT_SHARE:
                break
            os.unlink(path)
            total -= size
        return total


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, and its folder, so that no reader ever sees a part of it; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, hidden = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(hidden, path)
    except BaseException:
        os.unlink(hidden)
        raise
