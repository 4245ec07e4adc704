"""All parameters of the model under their names in a Hugging Face folder, and checks of the folder's tensors."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.runtime.checkpoint.storage import on_all_ranks
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.state.held_tensors import HeldTensor, Piece
from multimodal.hugging_face.adapter_files import DOWN_ENDING, TOKENS_ENDING, UP_ENDING
from multimodal.hugging_face.architecture import Architecture
from multimodal.hugging_face.weight_names import Rows, Spelling, rows_of, spelled
from multimodal.model.adapter import UP, is_adapter, is_new_rows
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph


class Shape(NamedTuple):
    """A tensor as a matrix."""

    num_rows: int
    row_size: int
    is_vector: bool = False
    """True if the tensor has one dimension."""


@dataclass(frozen=True)
class NamedWeights:
    """The weights of a whole model, whatever the plan."""

    rows: Mapping[str, tuple[Rows, ...]]
    """The rows that make up each parameter, by its name here (`model.<unit>.<parameter>`)."""
    shapes: Mapping[str, Shape]
    """Shapes of the folder's tensors, by their name there."""

    def renamed(self, named: Callable[[str], str]) -> "NamedWeights":
        """Return the same weights under other names there."""
        rows = {key: tuple(part._replace(key=named(part.key)) for part in parts) for key, parts in self.rows.items()}
        return NamedWeights(rows, {named(key): shape for key, shape in self.shapes.items()})


class Part(NamedTuple):
    """The part of one of the folder's tensors that a rank holds."""

    key: str
    rows: range
    columns: range
    piece: Piece
    first_row: int
    """The first row of the part in the piece."""
    row_size: int
    """The columns of the whole tensor as a matrix."""


def name_weights(tensors: Iterable[HeldTensor], *, graph: ModelGraph, architecture: Architecture, what: str) -> NamedWeights:
    """Name the parameters that all ranks hold together; collective.

    Raises CheckpointError, on every rank, for a parameter that the family of models does not have.
    """
    return name_tensors(tensors, lambda key, shape: _rows(key, shape, graph=graph, architecture=architecture), what=what)


def name_tensors(
    tensors: Iterable[HeldTensor], rows_of: Callable[[str, tuple[int, ...]], tuple[Rows, ...]], *, what: str
) -> NamedWeights:
    """Name the tensors that all ranks hold together; rows_of: returns the rows of one, by its key and shape; collective."""
    held = {tensor.key: tensor.shape for tensor in tensors}
    shapes = {key: shape for found in on_all_ranks(lambda: held, what=what) for key, shape in found.items()}
    rows = {key: rows_of(key, shape) for key, shape in sorted(shapes.items())}
    sizes: dict[str, Shape] = {}
    for key, parts in rows.items():
        for part in parts:
            known = sizes.get(part.key, Shape(0, math.prod(shapes[key][1:]), len(shapes[key]) == 1))
            sizes[part.key] = known._replace(num_rows=max(known.num_rows, part.start + part.num_rows))
    return NamedWeights(rows, sizes)


def name_as_here(tensors: Iterable[HeldTensor], *, prefix: str, what: str) -> NamedWeights:
    """Name tensors as they are called here, without a prefix; collective."""
    return name_tensors(tensors, lambda key, shape: (Rows(key.removeprefix(prefix), 0, 0, shape[0]),), what=what)


def _rows(key: str, shape: tuple[int, ...], *, graph: ModelGraph, architecture: Architecture) -> tuple[Rows, ...]:
    """Return a parameter's rows, and an adapter's under PEFT's names: of all matrices that make up one of ours, which share A.

    Of new rows of the vocabulary PEFT has the values, whole.
    """
    if is_adapter(key):
        module, _, half = key.rpartition(".")
        adapted = _rows(f"{module}.weight", shape, graph=graph, architecture=architecture)
        if half == UP:
            return tuple(part._replace(key=part.key.removesuffix(".weight") + UP_ENDING) for part in adapted)
        ending = TOKENS_ENDING if is_new_rows(key) else DOWN_ENDING
        names = dict.fromkeys(part.key.removesuffix(".weight") + ending for part in adapted)
        return tuple(Rows(name, 0, 0, shape[0]) for name in names)
    _, unit_name, parameter = key.split(".", 2)
    unit = graph.unit(unit_name)
    rows = rows_of(architecture.names_of(graph)[graph.units.index(unit)], unit, parameter, num_rows=shape[0])
    if not rows:
        raise CheckpointError(
            f"{architecture.name} has nothing for {key}; change the model to what the family has, or leave --load-hf and "
            "--save-hf out"
        )
    return rows


def as_spelled(names: NamedWeights, spelling: Spelling, *, prefix: str = "") -> NamedWeights:
    """Return the same weights in another spelling, such as that of transformers' modules, after a prefix."""
    return names.renamed(lambda key: prefix + spelled(key, spelling))


def best_spelling(names: NamedWeights, spellings: Iterable[Spelling], *, found: Collection[str]) -> Spelling:
    """Return the spelling in which most names are found."""
    return max(spellings, key=lambda each: sum(spelled(key, each) in found for key in names.shapes))


def as_in_files(names: NamedWeights, architecture: Architecture, *, found: Iterable[str]) -> NamedWeights:
    """Return the weights under the names in files, including the files' copies of tied embeddings; found: the files' names."""
    known = set(found)
    spelling = best_spelling(names, architecture.spellings, found=known)
    in_files = as_spelled(names, spelling)
    rows, shapes = in_files.rows, dict(in_files.shapes)
    for copy, original in ((spelled(copy, spelling), spelled(own, spelling)) for copy, own in architecture.tied_copies):
        if copy in known and copy not in shapes and original in shapes:
            shapes[copy] = shapes[original]
            # Copies come first, so that the original is read last.
            rows = {
                key: (*(part._replace(key=copy) for part in parts if part.key == original), *parts) for key, parts in rows.items()
            }
    return NamedWeights(rows, shapes)


def find_weights(
    files: WeightFiles, names: NamedWeights, *, graph: ModelGraph, architecture: Architecture, vocab_size: int
) -> NamedWeights:
    """Return the weights of a model under the names in a folder's files; vocab_size: the folder's.

    Raises CheckpointError if the files lack one, have another shape of it, or have an unknown one.
    """
    found = as_in_files(names, architecture, found=files.weights)
    unused = [key for key in files.weights if architecture.is_unused(key, graph)]
    check_weights(files, found, unused=unused, grown_from=(graph.backbone.vocab_size or 0, vocab_size))
    return found


def check_weights(
    files: WeightFiles, names: NamedWeights, *, unused: Collection[str] = (), grown_from: tuple[int, int] = (0, 0)
) -> None:
    """Raise CheckpointError if a folder lacks a tensor, has another shape of it, or has an unknown one.

    unused: tensors that are part of no parameter; grown_from: the vocabulary of this run and of the folder; tensors with as many
    rows as the former may have as many as the latter there.
    """
    folder, found = files.folder, files.weights
    for key, shape in names.shapes.items():
        weight = found.get(key)
        if weight is None:
            raise CheckpointError(
                f"{folder}: {key} is missing, which a model of this config.json has; copy the whole folder, or correct its "
                "config.json"
            )
        num_rows = grown_from[1] if shape.num_rows == grown_from[0] else shape.num_rows
        if weight.num_rows(shape.row_size) != num_rows or math.prod(weight.shape) != num_rows * shape.row_size:
            raise CheckpointError(
                f"{folder / weight.file}: {key} has shape {list(weight.shape)}, but config.json gives it {num_rows} rows of "
                f"{shape.row_size}; the two are not of one model: correct config.json, or take the weights that belong to it"
            )
    unknown = sorted(key for key in found if key not in names.shapes and key not in unused)
    if unknown:
        raise CheckpointError(
            f"{folder / found[unknown[0]].file}: nothing of this model is made of {unknown[0]} (and {len(unknown) - 1} others), "
            "so it is of another model than config.json says; correct that, or take other weights"
        )


def parts_of(tensor: HeldTensor, names: NamedWeights) -> Iterator[Part]:
    """Cut this rank's part of a parameter into parts of the folder's tensors, which are matrices or vectors.

    Pieces of tensors of more dimensions are whole rows of the matrix, or runs within one row.
    """
    for piece in tensor.pieces:
        first, column = piece.offsets[0], 0
        for size, offset in zip(tensor.shape[1:], piece.offsets[1:], strict=True):
            column = column * size + offset
        if len(tensor.shape) > 2:
            piece = Piece((first, column), piece.values.reshape(piece.values.shape[0], -1))
        columns = range(column, column + piece.values.shape[1]) if len(tensor.shape) > 1 else range(1)
        for rows in names.rows[tensor.key]:
            start = max(first, rows.target)
            stop = min(first + piece.values.shape[0], rows.target + rows.num_rows)
            if start < stop:
                theirs = range(start - rows.target + rows.start, stop - rows.target + rows.start)
                yield Part(rows.key, theirs, columns, piece, start - first, names.shapes[rows.key].row_size)
