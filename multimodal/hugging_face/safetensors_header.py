"""The header of a safetensors file: its tensors, and where their bytes are. Read without torch, and without their numbers."""

import json
import os
from operator import index
from pathlib import Path
from typing import NamedTuple

LENGTH_BYTES = 8
"""Bytes of a file before its header: the length of that."""
_LARGEST_HEADER = 2**27


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    dtype: str
    """Its type, as safetensors calls it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    stop: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata; raises OSError, and ValueError if it is none, or not whole."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        content, first = file.read(min(length, _LARGEST_HEADER)), LENGTH_BYTES + length
        num_bytes = os.fstat(file.fileno()).st_size - first
    try:
        header = json.loads(content)
        metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
        tensors = {}
        for key, entry in header.items():
            (start, stop), shape = map(index, entry["data_offsets"]), tuple(map(index, entry["shape"]))
            if not 0 <= start <= stop <= num_bytes or min(shape, default=0) < 0:
                raise ValueError(f"{key} has the offsets {start} to {stop}, and the shape {list(shape)}")
            tensors[key] = StoredTensor(str(entry["dtype"]), shape, first + start, first + stop)
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{type(problem).__name__}: {problem}") from problem
    if sum(each.stop - each.start for each in tensors.values()) != num_bytes:
        raise ValueError(f"it has {num_bytes} bytes behind its header, which its tensors do not fill")
    return tensors, metadata
