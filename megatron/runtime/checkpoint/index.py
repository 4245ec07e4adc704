"""`tensors.json`: the positions of a checkpoint's tensor values and their checksums; only plain numbers and names."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.runtime.checkpoint.folder import damaged

INDEX_NAME = "tensors.json"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class SavedPiece(NamedTuple):
    """A rectangle of a tensor, and the position of its bytes."""

    file: str
    start: int
    """Bytes from the beginning of the file."""
    offsets: tuple[int, ...]
    """The start of the rectangle in every dimension of the tensor."""
    sizes: tuple[int, ...]
    crc32: int
    """The checksum of its bytes."""

    def size_bytes(self, dtype: torch.dtype) -> int:
        """Return the number of bytes of the rectangle."""
        return math.prod(self.sizes) * dtype.itemsize


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: its pieces fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


TensorIndex = Mapping[str, SavedTensor]
"""Tensor's name -> its place in the files."""


def index_to_json(index: TensorIndex) -> bytes:
    """The content of `tensors.json`."""
    plain = {
        key: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tensor.shape, "pieces": tensor.pieces}
        for key, tensor in index.items()
    }
    return json.dumps(plain).encode()


def read_index(checkpoint: Path, *, files: Mapping[str, int], crc32: int) -> TensorIndex:
    """Read `tensors.json` of a checkpoint; raises CheckpointError if it is not as written, or describes impossible pieces.

    files: name -> bytes of the checkpoint's files. crc32: of `tensors.json`.
    """
    content = (checkpoint / INDEX_NAME).read_bytes()
    if zlib.crc32(content) != crc32:
        raise damaged(checkpoint, f"{INDEX_NAME} is not the one that was written (its checksum differs)")
    try:
        plain = _expect(json.loads(content), dict, "its content")
        return {key: _tensor(value, where=key, files=files) for key, value in plain.items()}
    except (ValueError, RecursionError) as problem:
        raise damaged(checkpoint, f"{INDEX_NAME} cannot be used ({problem})") from problem


def _tensor(value: Any, *, where: str, files: Mapping[str, int]) -> SavedTensor:
    entry = _expect(value, dict, where)
    name = entry.get("dtype")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{where}: dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    shape = _numbers(entry.get("shape"), minimum=1, where=f"{where}: shape")
    listed = _expect(entry.get("pieces"), list, f"{where}: pieces")
    pieces = tuple(_piece(piece, dtype=dtype, shape=shape, files=files, where=where) for piece in listed)
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        raise ValueError(f"{where}: its pieces do not fill the shape {list(shape)}")
    return SavedTensor(dtype, shape, pieces)


def _piece(value: Any, *, dtype: torch.dtype, shape: Sequence[int], files: Mapping[str, int], where: str) -> SavedPiece:
    entry = _expect(value, list, f"{where}: a piece")
    if len(entry) != len(SavedPiece._fields):
        raise ValueError(f"{where}: a piece must be {', '.join(SavedPiece._fields)}, found {len(entry)} entries")
    file, start, offsets, sizes, crc32 = entry
    start, crc32 = _numbers([start, crc32], minimum=0, where=f"{where}: start and checksum of a piece")
    offsets = _numbers(offsets, minimum=0, where=f"{where}: offsets of a piece")
    sizes = _numbers(sizes, minimum=1, where=f"{where}: sizes of a piece")
    piece = SavedPiece(_expect(file, str, f"{where}: file of a piece"), start, offsets, sizes, crc32)
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(f"{where}: a piece of {list(sizes)} at {list(offsets)} leaves the shape {list(shape)}")
    if piece.start + piece.size_bytes(dtype) > files.get(piece.file, 0):
        raise ValueError(f"{where}: a piece lies outside of the checkpoint's files, in {piece.file!r} from byte {piece.start}")
    return piece


def _expect(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} must be a {kind.__name__}, found {type(value).__name__}")
    return value


def _numbers(value: Any, *, minimum: int, where: str) -> tuple[int, ...]:
    for number in _expect(value, list, where):
        if type(number) is not int or number < minimum:
            raise ValueError(f"{where} must be whole numbers of at least {minimum}, found {number!r}")
    return tuple(value)
