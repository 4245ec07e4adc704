"""Initialises a model from the weights of a Hugging Face folder: every rank reads the rows and columns that it holds."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.runtime.checkpoint.storage import failing_together, on_this_rank
from megatron.runtime.gradients.sharded_unit import LayerKey
from megatron.runtime.hugging_face.named_weights import NamedWeights, find_weights, name_weights, parts_of
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, model_tensors, rows_of_tensor
from multimodal.hugging_face.registry import check_same_model, read_config
from multimodal.model.adapter import Adapter, adapter_of, is_adapter
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.units.unit import NEW_ROWS

VOCABULARIES = "word_embeddings.weight", "output_layer.weight"
"""Ends of the keys of matrices with a row for every token."""


def new_row_tensors(tensors: Iterable[HeldTensor], tokens: range) -> list[HeldTensor]:
    """Return the rows of these tokens in matrices of the vocabulary, under the keys of what is added to new rows; views."""
    keys = ((each, f"{each.key.removesuffix('weight')}{NEW_ROWS}") for each in tensors if each.key.endswith(VOCABULARIES))
    found = (rows_of_tensor(tensor, tokens, key=key) for tensor, key in keys)
    return [each for each in found if each.pieces]


def gather_adapters(session: Session) -> Mapping[str, Adapter]:
    """Return this rank's adapters by the key of their weight (`model.<unit>.<parameter>`); collective under ZeRO-3."""
    found = {}
    for (unit, index), stage in session.stages.items():
        sharded = session.gradients[unit].sharded
        for layer in stage.layer_range:
            adapted = {
                name: adapter
                for name, each in stage.layers[str(layer)].named_modules()
                if (adapter := adapter_of(each)) and each.weight is not None
            }
            gathered: AbstractContextManager[None] = nullcontext()
            if adapted and index in sharded:
                gathered = sharded[index].layers[LayerKey(layer, is_trained=True)].whole()
            with gathered:
                for name, (down, up, scale) in adapted.items():
                    copies = down.detach().clone(), up.detach().clone()
                    found[f"model.{unit}.layers.{layer}.{name}.weight"] = Adapter(*copies, scale)
    return found


_NUM_SCALED_BY = 256
"""About as many rows of the vocabulary determine the scale of new ones."""


def load_hugging_face(folder: Path, *, session: Session) -> None:
    """Fill all parameters from a folder that transformers' `save_pretrained`, or --save-hf, wrote; collective.

    Rows of tokens that are new to the folder are drawn like its others (see `NewRows`); adapters keep their initial values.
    Raises CheckpointError on every rank if something is missing, damaged or of another model; nothing in the files is executed.
    """
    what, graph = f"loading {folder}", session.graph
    described = on_this_rank(lambda: check_same_model(folder, graph), what=what)
    architecture, _ = read_config(folder)
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    names = name_weights(tensors, graph=graph, architecture=architecture, what=what)
    vocab_size = described.backbone.vocab_size or 0
    with failing_together(what=what), WeightFiles(folder) as files:
        theirs = find_weights(files, names, graph=graph, architecture=architecture, vocab_size=vocab_size)
        fill(tensors, files, theirs, new_rows=NewRows.of(graph))
    session.reload_optimizers()


class NewRows(NamedTuple):
    """Rows of the vocabulary that are drawn at random, with the mean of the folder's in every column, and as far from it."""

    std: float
    """The standard deviation of their values so far."""
    first: int | None
    """The first of them; the folder's values behind it are of no token. None: those that the folder lacks."""

    @classmethod
    def of(cls, graph: ModelGraph) -> "NewRows":
        """Return those of a model."""
        new = graph.backbone.new_tokens
        return cls(graph.backbone.transformer.init_method_std, new[0] if new else None)


@torch.no_grad()
def fill(tensors: Iterable[HeldTensor], files: WeightFiles, names: NamedWeights, *, new_rows: NewRows | None = None) -> None:
    """Fill this rank's parts. Parts of vectors that the files lack are zero: biases without effect.

    new_rows: those of the vocabulary; None: there are none.

    Raises CheckpointError for values that are not finite, and if a copy of tied embeddings differs from them: transformers would
    not tie the two.
    """
    for tensor in tensors:
        filled: dict[tuple[tuple[int, ...], int], str] = {}
        for piece in tensor.pieces if len(tensor.shape) == 1 else ():
            piece.values.zero_()
        for part in parts_of(tensor, names):
            num_known = files.weights[part.key].num_rows(part.row_size)
            if new_rows is not None and new_rows.first is not None and tensor.key.endswith(VOCABULARIES):
                num_known = min(num_known, new_rows.first)
            rows = range(part.rows.start, min(part.rows.stop, num_known))
            if new_rows is not None and len(rows) < len(part.rows) and len(tensor.shape) > 1:
                added = part.piece.values.narrow(0, part.first_row + len(rows), len(part.rows) - len(rows))
                mean, scale = _spread(files, part.key, num_rows=num_known, row_size=part.row_size)
                added.mul_(scale / new_rows.std).add_(mean[part.columns.start : part.columns.stop])
            if not rows:
                continue
            target = part.piece.values.narrow(0, part.first_row, len(rows))
            copy = filled.setdefault((part.piece.offsets, part.first_row), part.key)
            room = target if copy == part.key else torch.empty_like(target)
            for values in files.read(part.key, rows, part.columns, row_size=part.row_size, target=room):
                check_finite(values, files, part.key)
            if copy != part.key and not torch.equal(target, room):
                raise CheckpointError(
                    f"{files.folder}: {copy} is there beside {part.key}, which it differs from, though config.json ties the "
                    "two; make its tie_word_embeddings false, or take other weights"
                )


def check_finite(values: torch.Tensor, files: WeightFiles, key: str) -> None:
    """Raise CheckpointError if a weight of the files is no number, or infinite, in the run's type."""
    # The sum is not finite if any value is not; that takes a CPU a fraction of the time of `isfinite`, or of finding the largest.
    if not math.isfinite(values.sum()) and not values.isfinite().all():
        raise CheckpointError(
            f"{files.folder / files.weights[key].file}: {key} has values that are not finite (NaN or infinity) in "
            f"{str(values.dtype).removeprefix('torch.')}; copy the file again, take other weights, or a --dtype that holds them"
        )


def _spread(files: WeightFiles, key: str, *, num_rows: int, row_size: int) -> tuple[torch.Tensor, float]:
    """Return the mean of rows spread over a matrix, [row_size], and their root mean square distance; the same on every rank."""
    rows = files.read_whole(key).view(-1, row_size)[: num_rows : max(1, num_rows // _NUM_SCALED_BY)].double()
    return rows.mean(0), float((rows - rows.mean(0)).square().mean().sqrt())
