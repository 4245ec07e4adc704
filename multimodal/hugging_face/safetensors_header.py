"""The header of a safetensors file: its tensors, and where their bytes are. Read without torch, and without their numbers."""

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

LENGTH_BYTES = 8
"""Bytes of a file before its header: the length of that."""


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
    try:
        with safe_open(path, "np") as checked:
            metadata = checked.metadata() or {}
    except SafetensorError as problem:
        raise ValueError(str(problem)) from problem
    with open(path, "rb") as file:  # for the places, which the library does not tell
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {key: (LENGTH_BYTES + length + offset for offset in entry["data_offsets"]) for key, entry in header.items()}
    return {key: StoredTensor(entry["dtype"], tuple(entry["shape"]), *places[key]) for key, entry in header.items()}, metadata
