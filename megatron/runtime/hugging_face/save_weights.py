"""Writes the model into a Hugging Face folder: every rank its own rectangles, at once, into files of the final size.

The folder is written under a hidden name beside its own and then renamed, so whatever moment a process dies at, there is no
folder that could be loaded by half.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.checkpoint.all_ranks import on_all_ranks, on_first_rank, on_this_rank
from megatron.runtime.checkpoint.folder import hidden_folder, remove_dead_folders, sync_folder
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from megatron.runtime.hugging_face.adapters import gather_adapters
from megatron.runtime.hugging_face.file_layout import FileLayout, PlacedWeight, cut_into_files, in_one_file, like_files
from megatron.runtime.hugging_face.named_weights import (
    NamedWeights,
    Part,
    as_in_files,
    check_weights,
    name_tensors,
    name_weights,
    parts_of,
)
from megatron.runtime.hugging_face.unit_weights import check_units, is_composed, is_of_projector, name_unit
from megatron.runtime.hugging_face.weight_files import INDEX_NAME, SINGLE_NAME, WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, Piece, merged_tensors, model_tensors
from multimodal.hugging_face.registry import CONFIG_NAME, architecture_of, check_same_model, read_config, with_vocab_size
from multimodal.hugging_face.weight_names import Rows
from multimodal.model.adapter import is_adapter
from multimodal.values.errors import CheckpointError, ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph

_COPIED = (".json", ".txt", ".model", ".jinja", ".md")
"""Endings of the files that go with weights: tokenizer, templates, image processor, licence. No programs."""
_LARGEST_COPY = 256 * 2**20


class Export(NamedTuple):
    """What a folder gets."""

    names: NamedWeights
    layout: FileLayout
    config: dict[str, Any]
    config_name: str = CONFIG_NAME
    like: Path | None = None
    """The folder whose other files and tensors are copied."""


def find_folder_to_follow(model: Path, *, load_hf: Path | None) -> Path | None:
    """Return the folder that a model is written like: that of --load-hf, else the one that --model names, if it must be one.

    Families that can be written alone are, unless --load-hf says otherwise. Raises ModelError for a folder of an unknown family.
    """
    if load_hf is not None or not model.is_dir():
        return load_hf
    return model if read_config(model)[0].to_config is None else None


def check_hugging_face_target(folder: Path, *, graph: ModelGraph, like: Path | None, flag: str = "--save-hf") -> None:
    """Raise CheckpointError or ModelError for what would only show after training: no place, or no such family of models."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{flag} {folder}: is there already; give another folder, or remove it")
    if like is not None:
        check_same_model(like, graph)
    elif is_composed(graph):
        check_units(graph)
    else:
        architecture_of(graph)


def save_hugging_face(folder: Path, *, session: Session, like: Path | None = None) -> None:
    """Write a folder that `from_pretrained` of transformers loads, adapters added to the weights; collective.

    like: a folder of the same model, whose names, types, files, config.json and tokenizer it gets; None: names and config.json as
    the family of models has them, all of the run's type. Raises CheckpointError on every rank when it fails on any; there is then
    no folder.
    """
    what = f"saving to {folder}"
    session.complete_parameters()
    on_first_rank(lambda: _checked(folder, session.graph, like), what=what)
    adapters = gather_adapters(session)
    exports = (
        [("", _prepare(session, like, what=what), None)] if like or not is_composed(session.graph) else _parts(session, what)
    )
    for name, export, keys in exports:
        tensors = (each for each in merged_tensors(session.state, adapters) if keys is None or each.key in keys)
        write_folder(folder / name, export, session=session, tensors=tensors)


def write_folder(folder: Path, export: Export, *, session: Session, tensors: Iterable[HeldTensor]) -> None:
    """Write all ranks' tensors into the files of a new folder; collective. Raises CheckpointError as `save_hugging_face`."""
    what = f"saving to {folder}"
    partial = on_first_rank(lambda: _open_partial(folder, export.layout), what=what)
    try:
        on_this_rank(lambda: _write(partial, _own_tensors(tensors, session), export), what=what)
        on_first_rank(lambda: _complete(partial, folder, export), what=what)
    except CheckpointError:
        if dist.get_rank() == 0:
            with suppress(OSError):
                shutil.rmtree(partial)
        raise


def _checked(folder: Path, graph: ModelGraph, like: Path | None) -> None:
    try:
        check_hugging_face_target(folder, graph=graph, like=like)
    except ModelError as problem:
        raise CheckpointError(str(problem)) from problem


def _parts(session: Session, what: str) -> Iterator[tuple[str, Export, Collection[str]]]:
    """Yield the folders of a composed model: every unit like the one that it started from, and all projectors in one."""
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    for unit in session.graph.units:
        theirs = name_unit(tensors, session.graph, unit, what=what)
        with WeightFiles(theirs.folder) as files:
            layout = like_files(theirs.names, files.weights, files.metadata)
        config = read_mapping(theirs.folder / CONFIG_NAME, error=CheckpointError)
        yield unit.name, Export(theirs.names, layout, config, like=theirs.folder), theirs.names.rows
    projectors = projectors_export(
        session, [tensor for tensor in tensors if is_of_projector(session.graph, tensor.key)], what=what
    )
    yield "projectors", projectors, projectors.names.rows


def projectors_export(session: Session, projectors: Sequence[HeldTensor], *, what: str) -> Export:
    """Return the folder of a composed model's projectors, under their names here; collective."""
    names = name_tensors(projectors, lambda key, shape: (Rows(key.removeprefix("model."), 0, 0, shape[0]),), what=what)
    vectors = name_vectors(projectors, names, what=what)
    layout = in_one_file(SINGLE_NAME, names, session.options.build.precision.params_dtype, is_vector=vectors)
    return Export(names, layout, session.graph.to_dict(), "model.json")


def _prepare(session: Session, like: Path | None, *, what: str) -> Export:
    graph = session.graph
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    if like is None:
        architecture = architecture_of(graph)
        assert architecture.to_config is not None
        config = architecture.to_config(graph)
    else:
        architecture, config = read_config(like)
    names = name_weights(tensors, graph=graph, architecture=architecture, what=what)
    if like is None:
        dtype = session.options.build.precision.params_dtype
        layout = cut_into_files(names, dtype, is_vector=name_vectors(tensors, names, what=what))
        return Export(names, layout, {**config, "dtype": str(dtype).removeprefix("torch.")})
    vocab_size = graph.backbone.vocab_size or 0
    before = check_same_model(like, graph).backbone.vocab_size or 0

    def lay_out() -> tuple[NamedWeights, FileLayout]:
        with WeightFiles(like) as files:
            theirs = as_in_files(names, architecture, found=files.weights)
            unused = [key for key in files.weights if architecture.is_unused(key, graph)]
            check_weights(like, theirs, found=files.weights, unused=unused, grown_from=(vocab_size, before))
            return theirs, like_files(theirs, files.weights, files.metadata)

    names, layout = on_this_rank(lay_out, what=what)
    if vocab_size != before:
        config = with_vocab_size(config, vocab_size)
    return Export(names, layout, config, like=like)


def name_vectors(tensors: Iterable[HeldTensor], names: NamedWeights, *, what: str) -> set[str]:
    """Return the names of tensors with one dimension that all ranks hold together; collective."""
    vectors = on_all_ranks(lambda: [tensor.key for tensor in tensors if len(tensor.shape) == 1], what=what)
    return {rows.key for keys in vectors for key in keys for rows in names.rows[key]}


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
    """Write this rank's part. A failure waits for the end, since other ranks wait for this one's columns."""
    problem: OSError | None = None
    with _OpenFiles(partial) as files:
        for tensor in tensors:
            try:
                for part in parts_of(tensor, export.names) if problem is None else ():
                    place = export.layout.weights[part.key]
                    _write_part(files.descriptor(place.file), part, place)
            except OSError as failure:
                problem = failure
        if problem is not None:
            raise problem
        _copy_unused(files, export)
        files.sync()


class _OpenFiles(ExitStack):
    """The files of a folder that this rank writes into, open until the end of a `with`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._descriptors: dict[str, int] = {}

    def descriptor(self, name: str) -> int:
        """Return that of a file."""
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_WRONLY)
            self.callback(os.close, self._descriptors[name])
        return self._descriptors[name]

    def sync(self) -> None:
        """Have what was written on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)


def _copy_unused(files: _OpenFiles, export: Export) -> None:
    """Copy this rank's turn of the tensors that no parameter is made of."""
    unused = sorted(export.layout.weights.keys() - export.names.shapes.keys())[dist.get_rank() :: dist.get_world_size()]
    if export.like is None or not unused:
        return
    with WeightFiles(export.like) as source:
        for key in unused:
            place = export.layout.weights[key]
            _write_at(files.descriptor(place.file), _bytes_of(source.read_whole(key)), place.start)


def _write_part(descriptor: int, part: Part, place: PlacedWeight) -> None:
    values = part.piece.values.narrow(0, part.first_row, len(part.rows)).to(place.dtype)
    is_whole = len(part.columns) == place.row_size
    for row, content in zip(part.rows, [values] if is_whole else values, strict=False):
        _write_at(descriptor, _bytes_of(content), place.position(row, part.columns.start))


def _write_at(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _own_tensors(tensors: Iterable[HeldTensor], session: Session) -> Iterator[HeldTensor]:
    """Yield the tensors that this rank writes: its turn of what replicas hold alike; whole rows in place of columns."""
    for tensor in tensors:
        member = session.memberships[tensor.key.split(".")[1]]
        groups = member.groups
        if isinstance(session.gradients[member.unit], ShardedUnit):
            if not tensor.is_copy:
                yield tensor
            continue
        if member.is_unlike and not member.is_first_holder:
            continue
        replicas = groups.dp_cp
        if zlib.crc32(tensor.key.encode()) % replicas.size() != replicas.rank():
            continue
        rows = _rows_instead_of_columns(tensor, groups.tp)
        if not rows.is_copy:
            yield rows


def _rows_instead_of_columns(tensor: HeldTensor, group: dist.ProcessGroup) -> HeldTensor:
    """Trade a block of columns for one of whole rows with the tensor parallel group, which writes in one stroke."""
    piece = tensor.pieces[0]
    if len(tensor.pieces) != 1 or piece.values.dim() != 2 or piece.values.shape[1] == tensor.shape[1]:
        return tensor
    shares = [torch.empty_like(piece.values) for _ in range(group.size())]
    dist.all_gather(shares, piece.values.contiguous(), group=group)
    size = -(-tensor.shape[0] // group.size())
    start = min(group.rank() * size, tensor.shape[0])
    whole = torch.cat(shares, dim=1)[start : start + size]
    return HeldTensor(tensor.key, tensor.shape, tensor.dtype, (Piece((start, 0), whole),), is_copy=False)


def _bytes_of(values: Tensor) -> memoryview:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _complete(partial: Path, folder: Path, export: Export) -> None:
    if export.like is not None:
        for path in sorted(export.like.iterdir()):
            is_wanted = path.suffix in _COPIED and path.name not in (CONFIG_NAME, INDEX_NAME) and path.is_file()
            if is_wanted and path.stat().st_size <= _LARGEST_COPY and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
    _write_json(partial / export.config_name, export.config)
    if export.layout.index is not None:
        _write_json(partial / INDEX_NAME, export.layout.index)
    sync_folder(partial)
    if folder.is_dir():
        folder.rmdir()  # it is empty
    partial.rename(folder)
    sync_folder(folder.parent)


def _write_json(path: Path, value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
