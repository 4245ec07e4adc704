"""Pieces of tensors to files and back: every rank writes what it holds and reads what it needs.

torch.distributed.checkpoint plans both on rank 0 (who writes what several ranks hold, which saved rectangles a wanted one
overlaps) and checks that the written rectangles fill every tensor without overlap; here is told which rectangles there are. Files
are Braid's own (`files`): bare numbers and JSON, where torch's would be pickles.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.runtime.checkpoint.files import PieceReader, PieceWriter
from megatron.runtime.checkpoint.index import TensorIndex
from megatron.runtime.state.held_tensors import HeldTensor, Piece


class WrittenFiles(NamedTuple):
    """What this rank wrote."""

    sizes: dict[str, int]
    """File name -> bytes."""
    index_crc32: int
    """Of `tensors.json`, which rank 0 writes; 0 on other ranks."""


def write_tensors(folder: Path, tensors: Sequence[HeldTensor]) -> WrittenFiles:
    """Write the tensors of all ranks into `folder`; collective, files are on the disk when it returns.

    Raises torch's CheckpointException on every rank when any failed.
    """
    writer = PieceWriter(folder)
    save({}, storage_writer=writer, planner=_PieceSavePlanner(tensors))
    return WrittenFiles(writer.sizes, writer.index_crc32)


def read_tensors(folder: Path, tensors: Sequence[HeldTensor], *, index: TensorIndex) -> None:
    """Fill the pieces of all ranks from `folder`, whose `tensors.json` is `index`; collective.

    Every piece that is read is held against its checksum. Raises CheckpointException on every rank when any failed.
    """
    load({}, storage_reader=PieceReader(folder, index=index), planner=_PieceLoadPlanner(tensors))


class _PieceSavePlanner(DefaultSavePlanner):
    def __init__(self, tensors: Iterable[HeldTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = [tensor for tensor in tensors if not tensor.is_copy]
        self._values = {(tensor.key, piece.offsets): piece.values for tensor in self._tensors for piece in tensor.pieces}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(tensor, piece) for tensor in self._tensors for piece in tensor.pieces])

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


def _write_item(tensor: HeldTensor, piece: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(piece), TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
    return WriteItem(MetadataIndex(tensor.key, torch.Size(piece.offsets)), WriteItemType.SHARD, tensor_data=data)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.shape)
