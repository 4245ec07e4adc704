"""Pieces of tensors to and from files, one per rank and an index with checksums, in steps that fail on all ranks alike."""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import add, gt
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.runtime.checkpoint.folder import damaged, sync_file
from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.state.held_tensors import Box, HeldTensor, Piece
from multimodal.values.errors import BraidError, CheckpointError
from multimodal.values.typed_reader import Plain

INDEX_NAME = "tensors.json"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
Place = tuple[str, Box]
"""A piece: the tensor's name, and a rectangle of it."""


class SavedPiece(NamedTuple):
    """A rectangle of a tensor, and the position of its bytes."""

    file: str
    start: int
    """Bytes from the beginning of the file."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    crc32: int

    @property
    def box(self) -> Box:
        """The rectangle."""
        return Box(self.offsets, self.sizes)


_PLAIN_PIECES = tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], int], ...]


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: its pieces fill it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


TensorIndex = Mapping[str, SavedTensor]
"""Tensor's name -> its place in the files."""


def offer_pieces(tensors: Sequence[HeldTensor]) -> dict[Place, int]:
    """Return the pieces that this rank can write, with their bytes."""
    return {(tensor.key, piece.box): piece.values.nbytes for tensor in tensors if not tensor.is_copy for piece in tensor.pieces}


def choose_writers(offered: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """Return the rank that writes each piece: of those that offer it the one that has least to write so far."""
    holders: dict[Place, list[int]] = {}
    for rank, pieces in enumerate(offered):
        for place in pieces:
            holders.setdefault(place, []).append(rank)
    num_bytes, writers = [0] * len(offered), {}
    for place, ranks in holders.items():
        writers[place] = writer = min(ranks, key=num_bytes.__getitem__)
        num_bytes[writer] += offered[writer][place]
    return writers


def write_tensors(folder: Path, held: Sequence[HeldTensor], writers: Mapping[Place, int]) -> tuple[dict[str, int], TensorIndex]:
    """Write this rank's pieces into a file of its own; returns file name -> bytes, and the pieces' places. Raises OSError."""
    rank, written = dist.get_rank(), dict[str, SavedTensor]()
    own = ((tensor, piece) for tensor in held if not tensor.is_copy for piece in tensor.pieces)
    chosen = [(tensor, piece) for tensor, piece in own if writers[tensor.key, piece.box] == rank]
    if not chosen:
        return {}, {}
    name = f"rank_{rank:05d}.bin"
    with open(folder / name, "wb") as file:
        for tensor, piece in chosen:
            content = bytes_of(piece.values)
            saved = SavedPiece(name, file.tell(), *piece.box, zlib.crc32(content))
            file.write(content)
            before = written.get(tensor.key, SavedTensor(tensor.dtype, tensor.shape, ()))
            written[tensor.key] = replace(before, pieces=(*before.pieces, saved))
        size_bytes = file.tell()
        sync_file(file)
    return {name: size_bytes}, written


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in their order, in host memory."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def write_index(folder: Path, written: Sequence[TensorIndex]) -> tuple[int, int]:
    """Write `tensors.json` of the pieces that all ranks have written; returns its bytes and checksum. Raises OSError."""
    index: dict[str, SavedTensor] = {}
    for key, tensor in (item for of_rank in written for item in of_rank.items()):
        index[key] = replace(tensor, pieces=(*index[key].pieces, *tensor.pieces)) if key in index else tensor
    content = index_to_json(index)
    with open(folder / INDEX_NAME, "wb") as file:
        file.write(content)
        sync_file(file)
    return len(content), zlib.crc32(content)


@torch.no_grad()
def read_tensors(folder: Path, tensors: Sequence[HeldTensor], *, index: TensorIndex) -> None:
    """Fill this rank's pieces from the files of all ranks, checking every checksum; raises CheckpointError and OSError."""
    wanted = [
        (saved, tensor)
        for tensor in tensors
        for saved in index[tensor.key].pieces
        if any(piece.box.common(saved.box) for piece in tensor.pieces)
    ]
    wanted.sort(key=lambda each: each[0][:2])
    for name, pieces in groupby(wanted, key=lambda each: each[0].file):
        with open(folder / name, "rb") as file:
            for saved, tensor in pieces:
                dtype = index[tensor.key].dtype
                content = torch.empty(saved.box.num_elements * dtype.itemsize, dtype=torch.uint8)
                buffer = content.numpy().data
                file.seek(saved.start)
                if file.readinto(buffer) != len(buffer) or zlib.crc32(buffer) != saved.crc32:
                    raise damaged(folder, f"{name} does not hold what was written (the checksum of {tensor.key} differs)")
                tensor.fill(Piece(saved.offsets, content.view(dtype).view(saved.sizes)))


def index_to_json(index: TensorIndex) -> bytes:
    """The content of `tensors.json`."""
    plain = {
        key: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tensor.shape, "pieces": tensor.pieces}
        for key, tensor in index.items()
    }
    return json.dumps(plain).encode()


def read_index(checkpoint: Path, *, files: Mapping[str, int], crc32: int) -> TensorIndex:
    """Read `tensors.json`, which must have this checksum and fit the files (name -> bytes); raises CheckpointError."""
    content = (checkpoint / INDEX_NAME).read_bytes()
    if zlib.crc32(content) != crc32:
        raise damaged(checkpoint, f"{INDEX_NAME} is not the one that was written (its checksum differs)")
    try:
        plain = Plain(json.loads(content), "its content", CheckpointError).mapping()
        return {key: _tensor(value, files=files) for key, value in plain.items()}
    except (ValueError, RecursionError) as problem:
        raise damaged(checkpoint, f"{INDEX_NAME} cannot be used ({problem})") from problem


def _tensor(plain: Plain, *, files: Mapping[str, int]) -> SavedTensor:
    keys = ("dtype", "shape", "pieces")
    entry = plain.mapping(known=keys, required=keys)
    dtype = DTYPES[entry["dtype"].read(str, choices=tuple(DTYPES))]
    shape = entry["shape"].read(tuple[int, ...], minimum=1)
    pieces = tuple(SavedPiece(*values) for values in entry["pieces"].read(_PLAIN_PIECES, minimum=0))
    for file, start, offsets, sizes, _ in pieces:
        is_inside = len(offsets) == len(sizes) == len(shape) and 0 not in sizes
        if not is_inside or any(map(gt, map(add, offsets, sizes), shape)):
            plain.fail(f"a piece of {list(sizes)} at {list(offsets)} leaves the shape {list(shape)}")
        if start + math.prod(sizes) * dtype.itemsize > files.get(file, 0):
            plain.fail(f"a piece lies outside of the checkpoint's files, in {file!r} from byte {start}")
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        plain.fail(f"its pieces do not fill the shape {list(shape)}")
    return SavedTensor(dtype, shape, pieces)


_Result = TypeVar("_Result")
MAKE_ROOM = "make room or give another folder; a run with --save goes on from there"
"""The advice where a folder could not be written."""


def on_all_ranks(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> list[_Result]:
    """Run `action` on every rank and return all (small) results by rank; CheckpointError about `what` on all if one fails.

    group: a gloo group of all ranks, for a thread of its own; by default the run's.
    """
    return gather_objects(on_this_rank(action, what=what, group=group), group=group)


def on_this_rank(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> _Result:
    """Run `action` on every rank and return only this rank's result; errors as in `on_all_ranks`."""
    with failing_together(what=what, group=group):
        result = action()
    return result


@contextmanager
def failing_together(*, what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise CheckpointError on every rank if the body failed on any, of BraidErrors with their message."""
    problem = None
    try:
        yield
    except BraidError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{what} failed on rank {dist.get_rank()}: {type(error).__name__}: {' '.join(str(error).split())}"
    device = torch.device("cpu") if group is not None else torch.cuda.current_device()
    has_failed = torch.tensor([problem is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX, group=group)
    if has_failed.item():
        message = next(filter(None, gather_objects(problem, group=group)))  # it may quote untrusted text from a checkpoint
        raise CheckpointError("".join(character if character.isprintable() else ascii(character)[1:-1] for character in message))


def on_first_rank(action: Callable[[], _Result], *, what: str, group: ProcessGroup | None = None) -> _Result:
    """Run `action` on rank 0 only and return its result on every rank; errors as in `on_all_ranks`."""
    result = on_this_rank(lambda: action() if dist.get_rank() == 0 else None, what=what, group=group)
    told: list[Any] = [result]
    dist.broadcast_object_list(told, src=0, group=group)
    return told[0]
