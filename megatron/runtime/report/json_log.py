"""The log for programs: one JSON object per step, continued by a resumed run; a full disk does not end training."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multimodal.values.errors import ConfigError


class JsonLog:
    """Appends lines to --log-json."""

    def __init__(self, path: Path, *, keep_until: int) -> None:
        """Open a file; a run resumed after step `keep_until` keeps the lines up to there, a new run (0) starts an empty file.

        Raises ConfigError if it cannot be written.
        """
        self.kept: list[dict[str, Any]] = []
        """The entries of the earlier run."""
        with _named_in_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():  # a pipe or a device keeps nothing
                self.kept = list(_entries(path, keep_until)) if keep_until else []
                # Replaced by a new file written beside it, so that a run that is killed now loses nothing.
                beside = path.resolve().with_name(f"{path.resolve().name}.new")
                beside.write_text("".join(json.dumps(entry) + "\n" for entry in self.kept))
                beside.replace(path.resolve())
            self._file = path.open("ab", buffering=0)
            self._size_bytes = os.fstat(self._file.fileno()).st_size

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line as a whole or not at all; raises OSError."""
        line = (json.dumps(entry) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(line)

    def close(self) -> None:
        """Close the file, which already has every line."""
        self._file.close()


def check_log_file(path: Path) -> None:
    """Raise ConfigError if the file cannot be written; its lines stay."""
    with _named_in_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ConfigError(f"--log-json {path}: cannot be written ({problem.strerror}); give another path") from problem


def _entries(path: Path, keep_until: int) -> Iterator[dict[str, Any]]:
    """Yield the readable entries of an earlier run; the last line of a killed run may be incomplete."""
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step, told = (entry.get("step"), entry.get("loss", entry.get("samples"))) if isinstance(entry, dict) else (None, None)
        if isinstance(step, int) and step <= keep_until and isinstance(told, int | float | list):
            yield entry
