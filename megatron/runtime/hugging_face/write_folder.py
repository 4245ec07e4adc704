"""Writes a Hugging Face folder: all ranks write their rectangles at the same time, into files of the final size.

The folder is written under a hidden name beside its own and then renamed, so whenever a process dies, there is no folder that
could be loaded in part.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.runtime.checkpoint.folder import hidden_folder, remove_dead_folders, sync_file, sync_folder
from megatron.runtime.checkpoint.storage import MAKE_ROOM, bytes_of, on_first_rank, on_this_rank
from megatron.runtime.hugging_face.file_layout import FileLayout
from megatron.runtime.hugging_face.named_weights import NamedWeights, parts_of
from megatron.runtime.hugging_face.weight_files import INDEX_ENDING, WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, Piece
from multimodal.hugging_face.registry import CONFIG_NAME
from multimodal.model.expert_mlp import is_of_expert
from multimodal.values.errors import CheckpointError

_COPIED = (".json", ".txt", ".model", ".jinja", ".md")
"""Suffixes of the files that accompany weights: tokenizer, templates, image processor, licence. No programs."""
PIPELINE_INDEX = "model_index.json"
"""Says which modules a pipeline of diffusers has, each in a folder beside it."""
_LARGEST_COPY = 256 * 2**20


class Export(NamedTuple):
    """The content of a folder that is written."""

    names: NamedWeights
    layout: FileLayout
    written: Mapping[str, Mapping[str, Any]]
    """Further files, of JSON, by their names: the config, and processors if there is no folder to copy them from."""
    like: Path | None = None
    """The folder whose other files and tensors are copied."""
    beside: Path | None = None
    """The folder whose other files are copied, if `like` is None."""


def write_folder(folder: Path, export: Export, *, session: Session, tensors: Iterable[HeldTensor]) -> None:
    """Write all ranks' tensors into the files of a new folder; collective.

    Raises CheckpointError on every rank if it fails on any; there is then no folder.
    """
    what = f"saving to {folder}"
    partial = on_first_rank(lambda: _open_partial(folder, export.layout), what=what)
    try:
        on_this_rank(lambda: _write(partial, _own_tensors(tensors, session), export), what=what)
        on_first_rank(lambda: _complete(partial, folder, export), what=what)
    except CheckpointError as problem:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{problem}; {MAKE_ROOM}") from None


def _open_partial(folder: Path, layout: FileLayout) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_dead_folders(folder.parent, name=re.escape(folder.name))
    partial = hidden_folder(folder, "partial")
    partial.mkdir()
    for name, header in layout.headers.items():
        with open(partial / name, "wb") as file:
            file.write(header)
            file.truncate(layout.sizes[name])
    return partial


def _write(partial: Path, tensors: Iterable[HeldTensor], export: Export) -> None:
    """Write this rank's part. A failure is raised at the end, since other ranks wait for this one's columns."""
    problem: OSError | None = None
    descriptors: dict[str, int] = {}
    with ExitStack() as files:

        def write(name: str, content: memoryview, position: int) -> None:
            if name not in descriptors:
                descriptors[name] = os.open(partial / name, os.O_WRONLY)
                files.callback(os.close, descriptors[name])
            while content:
                count = os.pwrite(descriptors[name], content, position)
                content, position = content[count:], position + count

        for tensor in tensors:
            try:
                for part in parts_of(tensor, export.names) if problem is None else ():
                    place = export.layout.weights[part.key]
                    values = part.piece.values.narrow(0, part.first_row, len(part.rows)).to(place.dtype)
                    is_whole = len(part.columns) == place.row_size
                    for row, content in zip(part.rows, [values] if is_whole else values, strict=False):
                        write(place.file, bytes_of(content), place.position(row, part.columns.start))
            except OSError as failure:
                problem = failure
        if problem is not None:
            raise problem
        # and its share of the tensors that belong to no parameter
        unused = sorted(export.layout.weights.keys() - export.names.shapes.keys())[dist.get_rank() :: dist.get_world_size()]
        if export.like is not None and unused:
            with WeightFiles(export.like) as source:
                for key in unused:
                    place = export.layout.weights[key]
                    write(place.file, bytes_of(source.read_whole(key)), place.start)
        for descriptor in descriptors.values():
            os.fsync(descriptor)


def _own_tensors(tensors: Iterable[HeldTensor], session: Session) -> Iterator[HeldTensor]:
    """Yield the tensors that this rank writes: its share of replicated ones; whole rows in place of columns."""
    for tensor in tensors:
        member = session.memberships[tensor.key.split(".")[1]]
        groups = member.groups
        if session.gradients[member.unit].sharded:
            if not tensor.is_copy:
                yield tensor
            continue
        if member.is_unlike and not member.is_first_holder:
            continue
        replicas = groups.expt_dp if is_of_expert(tensor.key) else groups.dp_cp
        if zlib.crc32(tensor.key.encode()) % replicas.size() != replicas.rank():
            continue
        rows = _rows_instead_of_columns(tensor, groups.tp)
        if not rows.is_copy:
            yield rows


def _rows_instead_of_columns(tensor: HeldTensor, group: dist.ProcessGroup) -> HeldTensor:
    """Exchange a block of columns for one of whole rows in the tensor parallel group, which can be written at once."""
    piece = tensor.pieces[0]
    if len(tensor.pieces) != 1 or piece.values.dim() != 2 or piece.values.shape[1] == tensor.shape[1]:
        return tensor
    shares = [torch.empty_like(piece.values) for _ in range(group.size())]
    dist.all_gather(shares, piece.values.contiguous(), group=group)
    size = -(-tensor.shape[0] // group.size())
    start = min(group.rank() * size, tensor.shape[0])
    whole = torch.cat(shares, dim=1)[start : start + size]
    return HeldTensor(tensor.key, tensor.shape, tensor.dtype, (Piece((start, 0), whole),), is_copy=False)


def check_links(source: Path) -> None:
    """Raise CheckpointError if a file that would be copied is a link to somewhere outside of its folder."""
    if strays := [path for path in _accompanying(source) if not _stays_inside(path)]:
        raise CheckpointError(
            f"{strays[0]}: is a link to {strays[0].resolve()}, outside of the folder, which would be copied into the new one; "
            "put the file itself there, or remove the link"
        )


def _accompanying(source: Path) -> Iterator[Path]:
    """Yield the files that accompany weights."""
    for path in sorted(source.iterdir()):
        is_wanted = path.suffix in _COPIED and path.name != CONFIG_NAME and path.is_file()
        if is_wanted and path.stat().st_size <= _LARGEST_COPY and not path.name.endswith(INDEX_ENDING):
            yield path


def copy_pipeline(pipeline: Path, target: Path) -> None:
    """Copy what a module of diffusers is used with from its pipeline's folder: index, schedule and autoencoder.

    Raises CheckpointError for links that lead out of it, and OSError.
    """
    found = (pipeline / PIPELINE_INDEX, *(pipeline / "scheduler").rglob("*"), *(pipeline / "vae").rglob("*"))
    for path in (each for each in found if each.is_file() and each.suffix in (".json", ".safetensors")):
        if not _stays_inside(path, pipeline):
            raise CheckpointError(f"{path}: is a link to {path.resolve()}, outside of {pipeline}; put the file itself there")
        copy = target / path.relative_to(pipeline)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _stays_inside(path: Path, root: Path | None = None) -> bool:
    """Return True if a file is in its folder, or in the `blobs` that a cache of Hugging Face's hub links snapshots to.

    root: the folder, if the file is in one inside of it.
    """
    folder, target = (root or path.parent).resolve(), path.resolve()
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    return any(target.is_relative_to(each) for each in (folder, *blobs))


def _complete(partial: Path, folder: Path, export: Export) -> None:
    if (source := export.like or export.beside) is not None:
        for path in _accompanying(source):
            if _stays_inside(path):
                shutil.copyfile(path, partial / path.name)
    for name, content in {**export.written, **export.layout.index}.items():
        with open(partial / name, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
            sync_file(file)
    sync_folder(partial)
    if folder.is_dir():
        folder.rmdir()  # it is empty
    partial.rename(folder)
    sync_folder(folder.parent)
