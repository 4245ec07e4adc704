"""Pieces of tensors to files and back: every rank writes the pieces it holds and reads the pieces it needs.

torch.distributed.checkpoint plans both on rank 0 (which of several holders writes a value, which saved rectangles overlap a
wanted one) and checks that the written rectangles fill every tensor without overlap; this module names the rectangles. The file
format is Braid's own, since torch's files would be pickles: each writing rank has one file with the bytes of its pieces, and
`tensors.json` (`index`) describes them. Neither can contain anything executable.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron.runtime.checkpoint.folder import damaged
from megatron.runtime.checkpoint.index import INDEX_NAME, SavedPiece, SavedTensor, TensorIndex, index_to_json
from megatron.runtime.state.held_tensors import HeldTensor, Piece


class _AsPlanned:
    """Methods that torch calls on both sides of a storage, without any effect here."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...


class PieceWriter(_AsPlanned, StorageWriter):
    """Writes this rank's pieces into its file, and on rank 0 `tensors.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sizes: dict[str, int] = {}
        """File name -> bytes that this rank wrote."""
        self.index_crc32 = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write the pieces that torch's plan gives to this rank; raises OSError."""
        written: list[WriteResult] = []
        if plan.items:
            name = f"rank_{dist.get_rank():05d}.bin"
            with open(self._folder / name, "wb") as file:
                for item in plan.items:
                    values = planner.resolve_data(item)
                    assert isinstance(values, Tensor)
                    assert item.index.offset is not None
                    content = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                    start = file.tell()
                    file.write(content)
                    piece = SavedPiece(name, start, tuple(item.index.offset), tuple(values.shape), zlib.crc32(content))
                    written.append(WriteResult(item.index, len(content), piece))
                self.sizes[name] = file.tell()
                _sync(file)
        return _done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `tensors.json`, on rank 0; raises OSError."""
        pieces: dict[str, list[SavedPiece]] = {}
        for result in (result for of_rank in results for result in of_rank):
            pieces.setdefault(result.index.fqn, []).append(result.storage_data)
        index = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            index[key] = SavedTensor(tensor.properties.dtype, tuple(tensor.size), tuple(pieces[key]))
        content = index_to_json(index)
        with open(self._folder / INDEX_NAME, "wb") as file:
            file.write(content)
            _sync(file)
        self.sizes[INDEX_NAME], self.index_crc32 = len(content), zlib.crc32(content)


class PieceReader(_AsPlanned, StorageReader):
    """Reads, from the files of all ranks, the pieces of which this rank needs a part."""

    def __init__(self, folder: Path, *, index: TensorIndex) -> None:
        self._folder = folder
        self._index = index
        self._pieces: Mapping[MetadataIndex, SavedPiece] = {
            MetadataIndex(key, piece.offsets): piece for key, tensor in index.items() for piece in tensor.pieces
        }

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # torch asks for ranks' own metadata where more is taken
        """Return `tensors.json` in torch's form."""
        described: dict[str, Any] = {}
        for key, tensor in self._index.items():
            chunks = [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in tensor.pieces]
            properties = TensorProperties(dtype=tensor.dtype)
            described[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fill the tensors of torch's plan; raises CheckpointError for bytes that differ from those written, and OSError."""
        wanted: dict[tuple[SavedPiece, str], list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault((self._pieces[item.storage_index], item.storage_index.fqn), []).append(item)
        for name, pieces in groupby(sorted(wanted), key=lambda place: place[0].file):
            with open(self._folder / name, "rb") as file:
                for piece, key in pieces:
                    values = self._read(file, piece, key=key)
                    for item in wanted[piece, key]:
                        part, target = values, planner.resolve_tensor(item).detach()
                        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                            part = part.narrow(dimension, start, length)
                        target.copy_(part)
                        planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: BinaryIO, piece: SavedPiece, *, key: str) -> Tensor:
        dtype = self._index[key].dtype
        content = torch.empty(piece.size_bytes(dtype), dtype=torch.uint8)
        buffer = content.numpy().data
        file.seek(piece.start)
        if file.readinto(buffer) != len(buffer) or zlib.crc32(buffer) != piece.crc32:  # type: ignore[attr-defined]
            raise damaged(self._folder, f"{piece.file} does not hold what was written (the checksum of {key} differs)")
        return content.view(dtype).view(piece.sizes)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def write_tensors(
    folder: Path, tensors: Sequence[HeldTensor], *, group: ProcessGroup | None = None
) -> tuple[dict[str, int], int]:
    """Write the tensors of all ranks into `folder`; files are on the disk when it returns.

    Collective over `group`, by default the run's. Returns file name -> bytes of this rank's files, and the checksum of
    `tensors.json`, which rank 0 writes (0 on other ranks).

    Raises torch's CheckpointException on every rank if any rank failed.
    """
    writer = PieceWriter(folder)
    save({}, storage_writer=writer, planner=_PieceSavePlanner(tensors), process_group=group)
    return writer.sizes, writer.index_crc32


def read_tensors(folder: Path, tensors: Sequence[HeldTensor], *, index: TensorIndex) -> None:
    """Fill the pieces of all ranks from `folder`, whose `tensors.json` is `index`; collective.

    Every piece that is read is compared with its checksum. Raises CheckpointException on every rank if any rank failed.
    """
    load({}, storage_reader=PieceReader(folder, index=index), planner=_PieceLoadPlanner(tensors))


class _PieceSavePlanner(DefaultSavePlanner):
    def __init__(self, tensors: Iterable[HeldTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = [tensor for tensor in tensors if not tensor.is_copy]
        self._values = {(tensor.key, piece.offsets): piece.values for tensor in self._tensors for piece in tensor.pieces}

    def create_local_plan(self) -> SavePlan:
        items = []
        for tensor in self._tensors:
            for piece in tensor.pieces:
                data = TensorWriteData(_chunk(piece), TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                index = MetadataIndex(tensor.key, torch.Size(piece.offsets))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._values[index.fqn, tuple(index.offset or ())]


class _PieceLoadPlanner(DefaultLoadPlanner):
    def __init__(self, tensors: Iterable[HeldTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[str, list[Piece]] = {}
        for tensor in tensors:
            self._pieces.setdefault(tensor.key, []).extend(tensor.pieces)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, pieces in self._pieces.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [_chunk(piece) for piece in pieces])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._pieces[index.fqn][index.index].values


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.shape)
