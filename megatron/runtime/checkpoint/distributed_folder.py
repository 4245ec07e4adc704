"""Pieces of tensors to and from folders of torch.distributed.checkpoint (Megatron's torch_dist): files of ranks, and an index."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.runtime.checkpoint.manifest import MANIFEST_NAME, read_newest
from megatron.runtime.checkpoint.storage import MAKE_ROOM, TensorIndex, failing_together, read_index, read_tensors
from megatron.runtime.state.held_tensors import Box, HeldTensor, Piece, pieces_by_key
from multimodal.values.errors import CheckpointError


def write_folder(folder: Path, tensors: Sequence[HeldTensor], *, what: str) -> None:
    """Write the pieces of all ranks into an empty folder, each once; collective. Raises CheckpointError on every rank."""
    with failing_together(what=what), _explained(what):
        state_dict_saver.save({}, storage_writer=FileSystemWriter(folder), planner=_Writing(tensors))


def read_folder(folder: Path, tensors: Iterable[HeldTensor]) -> None:
    """Fill this rank's pieces, which the folder must have, converted to their types; raises CheckpointError for damaged files."""
    with _explained(f"reading {folder}", remedy="; copy it again"):
        state_dict_loader.load({}, storage_reader=FileSystemReader(folder), planner=_Reading(tensors), no_dist=True)


@contextmanager
def _explained(what: str, *, remedy: str = "") -> Iterator[None]:
    """Raise CheckpointError for what failed first inside torch, whose CheckpointException is no Exception, and all tracebacks."""
    try:
        yield
    except CheckpointException as problem:
        failure, _ = next(iter(problem.failures.values()))
        text = " ".join(str(failure).split())
        raise CheckpointError(f"{what} failed: {type(failure).__name__}: {text}{remedy}") from None


def read_index_of(folder: Path) -> tuple[Path, TensorIndex]:
    """Return the newest checkpoint of a run, or the given one, and its tensors; raises CheckpointError."""
    path, manifest = read_newest(folder)
    return path, read_index(path, files=manifest.files, crc32=manifest.index_crc32)


def has_optimizer_state(folder: Path) -> bool:
    """Return True if a run's checkpoint has its optimizer's state; raises CheckpointError."""
    return any(key.startswith("exp_avg.") for key in read_index_of(folder)[1])


def export_checkpoint(folder: Path, target: Path) -> None:
    """Write all tensors of a run's checkpoint, whole, and `braid.json` into a new folder, in one process; CheckpointError."""
    path, index = read_index_of(folder)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty; give a new folder")
    tensors = []
    for key, saved in index.items():
        whole = Piece((0,) * len(saved.shape), torch.empty(saved.shape, dtype=saved.dtype))
        tensors.append(HeldTensor(key, saved.shape, saved.dtype, (whole,), is_copy=False))
    read_tensors(path, tensors, index=index)
    with _explained(f"saving to {target}", remedy=f"; {MAKE_ROOM}"):
        state_dict_saver.save({}, storage_writer=FileSystemWriter(target), planner=_Writing(tensors), no_dist=True)
    shutil.copyfile(path / MANIFEST_NAME, target / MANIFEST_NAME)


class _Writing(DefaultSavePlanner):
    """Offers all pieces; of several ranks that offer the same, torch lets the one write it that has least to write."""

    def __init__(self, tensors: Sequence[HeldTensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for tensor in tensors:
            for piece in () if tensor.is_copy else tensor.pieces:
                index = MetadataIndex(tensor.key, torch.Size(piece.offsets))
                if index in self._values:
                    continue
                self._values[index] = piece.values
                data = TensorWriteData(_chunk(piece.box), TensorProperties(tensor.dtype), torch.Size(tensor.shape))
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._values[write_item.index].detach().cpu().contiguous()


class _Reading(DefaultLoadPlanner):
    def __init__(self, tensors: Iterable[HeldTensor]) -> None:
        super().__init__()
        self._targets = pieces_by_key(tensors)

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        assert self.metadata is not None
        for key, pieces in self._targets.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [_chunk(piece.box) for piece in pieces])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index.index
        assert index is not None
        values = self._targets[read_item.dest_index.fqn][index].values
        starts = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return values[tuple(slice(start, start + size) for start, size in starts)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
