"""Weights of composed models: every unit has a folder of its own, of a known family or of an unchanged module."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from megatron.runtime.checkpoint.storage import failing_together, on_first_rank, on_this_rank
from megatron.runtime.hugging_face.load_weights import NewRows, fill
from megatron.runtime.hugging_face.named_weights import (
    NamedWeights,
    as_spelled,
    best_spelling,
    check_weights,
    find_weights,
    name_as_here,
    name_tensors,
    name_weights,
)
from megatron.runtime.hugging_face.weight_files import WeightFiles
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, model_tensors
from multimodal.hugging_face.registry import architecture_of, check_same_unit, read_config, read_encoder
from multimodal.hugging_face.weight_names import Rows, rows_of
from multimodal.model.adapter import is_adapter
from multimodal.model.layers.opaque import rename_keys
from multimodal.values.errors import CheckpointError, ModelError
from multimodal.values.model_graph import ModelGraph, Role, Unit


def is_composed(graph: ModelGraph) -> bool:
    """Return True if any unit has a folder of its own."""
    return any(unit.weights is not None for unit in graph.units)


def is_written_in_parts(graph: ModelGraph) -> bool:
    """Return True if a model is written as one folder per unit, because no family describes the whole model."""
    try:
        return is_composed(graph) and not architecture_of(graph)
    except ModelError:
        return True


def check_units(graph: ModelGraph) -> None:
    """Raise ModelError if a unit has no folder whose form it could be written in."""
    if strays := [unit.name for unit in graph.units if unit.weights is None]:
        raise ModelError(
            f"unit '{strays[0]}' started from no folder of Hugging Face, as the others did, so there is none that it could be "
            "written like; give it 'weights', or leave --save-hf out"
        )


def load_units(session: Session) -> None:
    """Fill every unit that has a folder, except its projector and adapters; collective.

    Raises CheckpointError on every rank if something is missing, damaged or of another model.
    """
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    for unit in session.graph.units:
        if unit.weights is None:
            continue
        what = f"loading unit '{unit.name}' from {unit.weights}"
        if unit.module is None:
            on_this_rank(partial(check_same_unit, session.graph, unit), what=what)
        theirs = name_unit(tensors, session.graph, unit, what=what)
        with failing_together(what=what), WeightFiles(Path(unit.weights)) as files:
            fill((each for each in tensors if each.key in theirs.rows), files, theirs, new_rows=NewRows.of(session.graph))
    session.reload_optimizers()


def name_unit(tensors: Iterable[HeldTensor], graph: ModelGraph, unit: Unit, *, what: str) -> NamedWeights:
    """Name a unit's parameters on all ranks, except its projector's, as in its folder; collective."""
    assert unit.weights is not None
    folder = Path(unit.weights)
    own = [each for each in tensors if each.key.split(".")[1] == unit.name and not is_of_projector(graph, each.key)]
    if unit.module is not None:
        start = f"model.{unit.name}.layers.{0 if unit.role is Role.ENCODER else 1}.module."
        names = name_as_here(own, prefix=start, what=what)
        return on_first_rank(lambda: _find_module(folder, names, unit), what=what)
    if unit.role is not Role.BACKBONE:
        return _encoder_names(own, unit, folder, what=what)
    architecture, config = on_this_rank(lambda: read_config(folder), what=what)
    alone = ModelGraph((unit,))
    names = name_weights(own, graph=alone, architecture=architecture, what=what)
    vocab_size = config.get("vocab_size", unit.vocab_size) or 0

    def find() -> NamedWeights:
        with WeightFiles(folder) as files:
            return find_weights(files, names, graph=alone, architecture=architecture, vocab_size=vocab_size)

    return on_first_rank(find, what=what)


def _encoder_names(own: Iterable[HeldTensor], unit: Unit, folder: Path, *, what: str) -> NamedWeights:
    """Return the names of an encoder or generator with Braid's layers, in a folder that may contain other tensors, too."""
    encoder, _ = on_this_rank(lambda: read_encoder(folder, unit.role), what=what)

    def rows(key: str, shape: tuple[int, ...]) -> tuple[Rows, ...]:
        found = rows_of(encoder.names, unit, key.split(".", 2)[2], num_rows=shape[0])
        if not found:
            raise CheckpointError(f"{encoder.name} in {folder} has nothing for {key}; correct the model file, or its weights")
        return found

    names = name_tensors(own, rows, what=what)

    def check() -> NamedWeights:
        with WeightFiles(folder) as files:
            theirs = as_spelled(names, best_spelling(names, encoder.spellings, found=files.weights))
            check_weights(files, theirs, unused=[key for key in files.weights if encoder.is_unused(key, unit)])
            return theirs

    return on_first_rank(check, what=what)


def is_of_projector(graph: ModelGraph, key: str) -> bool:
    """Return True if a tensor (`model.<unit>.layers.<layer>. ...`) belongs to a projector.

    The norm behind an encoder's layers comes from its folder, if that has one: it is the projector's first operation. A norm of
    merged tokens belongs to the projector. So do no embeddings of diffusers, which a generator's first layer also has.
    """
    _, name, _, layer, tensor = key.split(".", 4)
    unit = graph.unit(name)
    if int(layer) != unit.projector_layer or unit.role is Role.GENERATOR:
        return int(layer) == unit.projector_layer and not tensor.startswith("embedding.")
    has_own_norm = unit.weights is not None and unit.module is None
    return not (has_own_norm and unit.projector_norm == "patches" and tensor.startswith("norm."))


def _find_module(folder: Path, names: NamedWeights, unit: Unit) -> NamedWeights:
    """Return the names in a folder: those of the module in transformers' files, possibly inside a larger model."""
    with WeightFiles(folder) as files:
        renamed = rename_keys(unit, files.weights) if unit.role is Role.ENCODER else {key: key for key in files.weights}
        first = next(iter(names.shapes))
        prefixes = [key.removesuffix(first) for key in renamed if key == first or key.endswith(f".{first}")] or [""]
        prefix = max(prefixes, key=lambda each: sum(each + key in renamed for key in names.shapes))
        found = names.renamed(lambda key: renamed.get(prefix + key, prefix + key))
        check_weights(files, found, unused=files.weights.keys())
        return found
