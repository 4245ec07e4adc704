"""An assignment that takes long to choose is chosen by one rank of a node; the others read it.

Each rank still computes the digest that all ranks compare before a step: one that sees other lengths chooses for itself, and the
comparison finds it.
"""

import fcntl
import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import numpy as np

from multimodal.values.assignment import Assignment
from multimodal.values.length_arrays import LengthBatch

_MOST_KEPT = 32
"""Decisions that are kept for ranks that are behind; one that comes even later decides for itself."""


class NodeDecisions:
    """Decisions of a node's ranks in a folder for temporary files, which only this user can read."""

    def __init__(self, name: str, *, subject: object) -> None:
        """name: a text that no other run has; subject: what decisions depend on besides lengths, by its `repr`."""
        self._folder = Path(tempfile.gettempdir()) / f"braid-{name}"
        self._subject = repr(subject).encode()

    def find(self, lengths: LengthBatch, decide: Callable[[], Assignment]) -> Assignment:
        """Return the assignment that another rank has chosen for these lengths, waiting for it, or choose it.

        Raises what `decide` raises, on every rank. Where the folder cannot be used, each rank decides for itself.
        """
        try:
            key, found = self._folder / self._digest(lengths), None
        except (TypeError, OverflowError):  # lengths that `decide` refuses, and says why
            return decide()
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with key.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if key.exists():
                    found = pickle.loads(key.read_bytes())
                else:
                    found = decide()
                    part = key.with_suffix(".part")
                    part.write_bytes(pickle.dumps(found))
                    part.rename(key)
                    newest_first = sorted(self._folder.iterdir(), key=os.path.getmtime, reverse=True)
                    for file in newest_first[2 * _MOST_KEPT :]:
                        file.unlink(missing_ok=True)
        return decide() if found is None else found

    def close(self) -> None:
        """Remove the folder; ranks that are behind decide for themselves."""
        with suppress(OSError):
            for file in self._folder.iterdir():
                file.unlink(missing_ok=True)
            self._folder.rmdir()

    def _digest(self, lengths: LengthBatch) -> str:
        digest, arrays = hashlib.blake2b(self._subject), lengths.arrays
        for each in (getattr(arrays, field.name) for field in fields(arrays)):
            digest.update(np.ascontiguousarray(each).tobytes() if isinstance(each, np.ndarray) else repr(each).encode())
        return digest.hexdigest()
