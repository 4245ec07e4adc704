"""Initialises adapters from a folder of Hugging Face's PEFT: every rank keeps its part of them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.runtime.checkpoint.storage import failing_together, on_this_rank
from megatron.runtime.hugging_face.load_weights import VOCABULARIES, check_finite, fill, new_row_tensors
from megatron.runtime.hugging_face.named_weights import as_spelled, check_weights, name_as_here, name_weights
from megatron.runtime.hugging_face.unit_weights import is_composed, is_of_projector
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, Piece, model_tensors
from multimodal.hugging_face.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DOWN_ENDING,
    PREFIX,
    UP_ENDING,
    OwnModule,
    PeftAdapter,
    all_spellings,
    read_peft_adapter,
)
from multimodal.hugging_face.weight_names import rows_of
from multimodal.model.adapter import UP, is_adapter, is_new_rows
from multimodal.values.errors import CheckpointError

_PROJECTORS = "projectors"


def load_adapter(folder: Path, *, session: Session, base: Path | None) -> None:
    """Fill the adapters in a folder, and the projectors beside them; collective.

    base: the folder of the model's weights, if they come from one. Adapters that `folder` lacks, and rows of A beyond its rank,
    keep their initial values; their B is zero. Raises CheckpointError on every rank if something is missing, damaged or of
    another model.
    """
    what = f"loading {folder}"
    adapter = on_this_rank(lambda: read_peft_adapter(folder, graph=session.graph, base=base), what=what)
    tensors = model_tensors(session.state)
    own = [tensor for tensor in tensors if is_adapter(tensor.key) and not is_new_rows(tensor.key)]
    is_run = session.options.optimizer is not None
    if is_run and adapter.new_tokens is not None and adapter.new_tokens != session.graph.backbone.new_tokens:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: trainable_token_indices go from {adapter.new_tokens[0]} to {adapter.new_tokens[1] - 1}, "
            f"but this run trains {session.graph.backbone.new_tokens or 'none'}, those that its tokenizer adds; add the adapter "
            "to the weights first (tools/convert.py --load-hf, --load-adapter, --save-hf)"
        )
    with failing_together(what=what), WeightFiles(adapter.folder, single=ADAPTER_WEIGHTS) as files:
        for tensor in own:
            _fill_half(tensor, files, adapter, session)
    for piece in (piece for tensor in tensors if is_new_rows(tensor.key) and adapter.new_tokens for piece in tensor.pieces):
        piece.values.zero_()  # the folder has the sum
    plain = [tensor for tensor in tensors if not is_adapter(tensor.key)]
    plain += new_row_tensors(plain, range(*adapter.new_tokens or (0,)))
    if adapter.others:
        _fill_others(plain, adapter, session, what=what)
    elif (folder / _PROJECTORS).is_dir() and is_composed(session.graph):
        projectors = [tensor for tensor in plain if is_of_projector(session.graph, tensor.key)]
        names = name_as_here(projectors, prefix="model.", what=what)
        with failing_together(what=what), WeightFiles(folder / _PROJECTORS) as files:
            check_weights(files, names)
            fill(projectors, files, names)
    session.reload_optimizers()


@torch.no_grad()
def _fill_half(tensor: HeldTensor, files: WeightFiles, adapter: PeftAdapter, session: Session) -> None:
    """Fill this rank's part of A or of B."""
    module, _, half = tensor.key.rpartition(".")
    _, name, _, layer, path = module.split(".", 4)
    unit = session.graph.unit(name)
    assert unit.lora is not None
    for piece in tensor.pieces if half == UP else ():
        piece.values.zero_()
    for part, start in adapter.columns(OwnModule(name, int(layer), unit.layers[int(layer)], path)):
        if half == UP:
            values = _read_half(files, f"{PREFIX}{part.name}{UP_ENDING}", columns=part.rank)
            values = values if part.scale == unit.lora.scale else values.double() * (part.scale / unit.lora.scale)
            for rows in rows_of(adapter.names(name), unit, f"layers.{layer}.{path}.weight", num_rows=tensor.shape[0]):
                if rows.key == f"{part.key}.weight":
                    stop = rows.start + rows.num_rows
                    if len(values) < stop:
                        raise CheckpointError(
                            f"{adapter.folder}: {part.name}{UP_ENDING} has {len(values)} rows, but the model's matrix at least "
                            f"{stop}; give adapters of this model, or take the model that they are of"
                        )
                    tensor.fill(Piece((rows.target, start), values[rows.start : stop]))
        else:
            values = _read_half(files, f"{PREFIX}{part.name}{DOWN_ENDING}", columns=tensor.shape[1])
            tensor.fill(Piece((start, 0), values))


def _read_half(files: WeightFiles, key: str, *, columns: int) -> Tensor:
    values = files.read_whole(key)
    if values.dim() != 2 or values.shape[1] != columns:
        raise CheckpointError(
            f"{key} has shape {list(values.shape)}, expected {columns} columns; give adapters of this model, or take the model "
            "that they are of"
        )
    check_finite(values, files, key)
    return values


def _fill_others(plain: Sequence[HeldTensor], adapter: PeftAdapter, session: Session, *, what: str) -> None:
    """Fill the parameters that were trained beside adapters (PEFT's `modules_to_save`); collective."""
    others = set(adapter.others)
    own = [tensor for tensor in plain if tensor.key.split(".")[1] in adapter.graph.unit_names]
    names = name_weights(own, graph=adapter.graph, architecture=adapter.architecture, what=what)
    spelled = [as_spelled(names, spelling, prefix=PREFIX) for spelling in all_spellings(adapter.architecture)]
    theirs = max(spelled, key=lambda each: len(each.shapes.keys() & others))
    with failing_together(what=what):
        if unknown := sorted(others - theirs.shapes.keys()):
            raise CheckpointError(
                f"{adapter.folder / ADAPTER_WEIGHTS}: the model has nothing that is called {unknown[0]}; give adapters of this "
                "model"
            )
        wanted = [tensor for tensor in own if all(rows.key in others for rows in theirs.rows[tensor.key])]
        if adapter.graph.backbone.ties_embeddings and any(tensor.key.endswith(VOCABULARIES) for tensor in wanted):
            raise CheckpointError(
                f"{adapter.folder / ADAPTER_WEIGHTS}: PEFT trained embeddings apart from the output, here the same matrix; "
                "merge this adapter with PEFT into a model of two matrices"
            )
        with WeightFiles(adapter.folder, single=ADAPTER_WEIGHTS) as files:
            fill(wanted, files, theirs)
