"""Initialises a model from the weights of a Hugging Face folder: every rank reads the rows and columns that it holds."""

from collections.abc import Iterable
from pathlib import Path

import torch

from megatron.runtime.checkpoint.all_ranks import on_this_rank
from megatron.runtime.hugging_face.named_weights import NamedWeights, as_in_files, check_weights, name_weights, parts_of
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, model_tensors
from multimodal.hugging_face.registry import check_same_model, read_config
from multimodal.model.adapter import is_adapter
from multimodal.values.errors import CheckpointError, ModelError
from multimodal.values.model_graph import ModelGraph


def load_hugging_face(folder: Path, *, session: Session) -> None:
    """Fill all parameters from a folder that transformers' `save_pretrained`, or --save-hf, wrote; collective.

    Rows of the vocabulary that the folder lacks keep their initial values, and so do adapters. Raises CheckpointError on every
    rank if something is missing, damaged or of another model; nothing in the files is executed.
    """
    what, graph = f"loading {folder}", session.graph
    described = on_this_rank(lambda: _described(folder, graph), what=what)
    architecture, _ = read_config(folder)
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    names = name_weights(tensors, graph=graph, architecture=architecture, what=what)
    vocabularies = graph.backbone.vocab_size or 0, described.backbone.vocab_size or 0

    def read() -> None:
        with WeightFiles(folder) as files:
            theirs = as_in_files(names, architecture, found=files.weights)
            unused = [key for key in files.weights if architecture.is_unused(key, graph)]
            check_weights(folder, theirs, found=files.weights, unused=unused, grown_from=vocabularies)
            fill(tensors, files, theirs)

    on_this_rank(read, what=what)
    for optimizer in session.optimizers.values():
        optimizer.reload_model_params()


def _described(folder: Path, graph: ModelGraph) -> ModelGraph:
    try:
        return check_same_model(folder, graph)
    except ModelError as problem:
        raise CheckpointError(str(problem)) from problem


@torch.no_grad()
def fill(tensors: Iterable[HeldTensor], files: WeightFiles, names: NamedWeights) -> None:
    """Fill this rank's parts. Parts of vectors that the files lack are zero: biases without effect.

    Raises CheckpointError if a copy of tied embeddings differs from them: transformers would not tie the two.
    """
    for tensor in tensors:
        filled: dict[tuple[tuple[int, ...], int], str] = {}
        for piece in tensor.pieces if len(tensor.shape) == 1 else ():
            piece.values.zero_()
        for part in parts_of(tensor, names):
            rows = range(part.rows.start, min(part.rows.stop, files.weights[part.key].num_rows(part.row_size)))
            if not rows:
                continue
            values = files.read(part.key, rows, part.columns, row_size=part.row_size)
            target = part.piece.values.narrow(0, part.first_row, len(rows))
            values = values.reshape(target.shape).to(target)
            copy = filled.setdefault((part.piece.offsets, part.first_row), part.key)
            if copy != part.key and not torch.equal(target, values):
                raise CheckpointError(
                    f"{files.folder}: {copy} is there beside {part.key}, which it differs from, though config.json ties the two; "
                    "make its tie_word_embeddings false, or take other weights"
                )
            target.copy_(values)
