"""Pieces of tensors to files and back, by torch.distributed.checkpoint: every rank writes what it holds and reads what it needs.

torch plans both on rank 0 (who writes what several ranks hold, which saved rectangles a wanted one overlaps) and checks that the
written rectangles fill every tensor without overlap; here is only told which rectangles there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.runtime.checkpoint_pieces import Piece
from megatron.runtime.checkpoint_tensors import HeldTensor


def write_tensors(folder: Path, tensors: Sequence[HeldTensor]) -> None:
    """Write the tensors of all ranks into `folder`; collective, files are on the disk when it returns.

    Raises torch's CheckpointException on every rank when any failed.
    """
    save({}, storage_writer=FileSystemWriter(folder), planner=_PieceSavePlanner(tensors))


def read_tensors(folder: Path, tensors: Sequence[HeldTensor]) -> None:
    """Fill the pieces of all ranks from `folder`; collective. Raises CheckpointException on every rank when any failed."""
    load({}, storage_reader=FileSystemReader(folder), planner=_PieceLoadPlanner(tensors))


def saved_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


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
