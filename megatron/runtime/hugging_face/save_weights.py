"""Determines the content of a Hugging Face folder (tensors, names and files), and writes it."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron.runtime.checkpoint.all_ranks import failing_together, on_all_ranks, on_first_rank
from megatron.runtime.hugging_face.adapters import gather_adapters
from megatron.runtime.hugging_face.file_layout import cut_into_files, in_one_file, like_files
from megatron.runtime.hugging_face.named_weights import NamedWeights, as_spelled, find_weights, name_tensors, name_weights
from megatron.runtime.hugging_face.unit_weights import check_units, is_of_projector, is_written_in_parts, name_unit
from megatron.runtime.hugging_face.weight_files import SINGLE_NAME, WeightFiles
from megatron.runtime.hugging_face.write_folder import PIPELINE_INDEX, Export, check_links, copy_pipeline, write_folder
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, merged_tensors, model_tensors
from multimodal.hugging_face.registry import CONFIG_NAME, architecture_of, check_same_model, read_config, with_vocab_size
from multimodal.hugging_face.weight_names import Rows, spelled
from multimodal.model.adapter import is_adapter
from multimodal.values.errors import CheckpointError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph


def find_folder_to_follow(model: Path, *, load_hf: Path | None) -> Path | None:
    """Return the folder whose form a written model follows: that of --load-hf, else the one that --model names, if needed.

    Text models are written on their own, unless --load-hf is given; others with the files beside their weights. Raises ModelError
    for a folder of an unknown family.
    """
    if load_hf is not None or not model.is_dir():
        return load_hf
    return model if read_config(model)[0].placeholders else None


def check_hugging_face_target(folder: Path, *, graph: ModelGraph, like: Path | None, flag: str = "--save-hf") -> None:
    """Raise CheckpointError or ModelError for errors that would only show after training: no place, or no such family."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{flag} {folder}: is there already; give another folder, or remove it")
    sources = {like} if like is not None else {unit.weights for unit in graph.units}
    for source in sources if flag == "--save-hf" else ():  # nothing is copied beside adapters
        if source is not None and Path(source).is_dir():
            check_links(Path(source))
    if like is not None:
        check_same_model(like, graph)
    elif is_written_in_parts(graph):
        check_units(graph)
    else:
        architecture_of(graph)


def save_hugging_face(
    folder: Path, *, session: Session, like: Path | None = None, special_tokens: Mapping[str, int] | None = None
) -> None:
    """Write a folder that transformers' `from_pretrained` loads, with adapters added to the weights; collective.

    like: a folder of the same model, which determines names, types, files, config.json and tokenizer; None: names and config.json
    of the family, everything in the run's type; special_tokens: the tokenizer's, by their names there, for that config.json.
    Raises CheckpointError on every rank if it fails on any; there is then no folder.
    """
    what = f"saving to {folder}"
    session.complete_parameters()
    on_first_rank(lambda: check_hugging_face_target(folder, graph=session.graph, like=like), what=what)
    adapters = gather_adapters(session)
    exports: Iterable[tuple[str, Export, Collection[str] | None]]
    if like is None and is_written_in_parts(session.graph):
        exports = _parts(session, what)
    else:
        exports = [("", _prepare(session, like, special_tokens=special_tokens or {}, what=what), None)]
    for name, export, keys in exports:
        tensors = (each for each in merged_tensors(session.state, adapters) if keys is None or each.key in keys)
        pipeline = export.like.parent if export.like is not None and (export.like.parent / PIPELINE_INDEX).is_file() else None
        place = folder / name if pipeline is None or export.like is None else folder / name / export.like.name
        write_folder(place, export, session=session, tensors=tensors)
        if pipeline is not None:
            on_first_rank(partial(copy_pipeline, pipeline, folder / name), what=what)


def _parts(session: Session, what: str) -> Iterator[tuple[str, Export, Collection[str]]]:
    """Yield the folders of a composed model: every unit in the form of its original folder, and all projectors in one."""
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    for unit in session.graph.units:
        assert unit.weights is not None  # see check_units
        folder, names = Path(unit.weights), name_unit(tensors, session.graph, unit, what=what)
        with WeightFiles(folder) as files:
            layout = like_files(names, files.weights, files.metadata)
        config = read_mapping(folder / CONFIG_NAME, error=CheckpointError)
        yield unit.name, Export(names, layout, config, like=folder), names.rows
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


def _prepare(session: Session, like: Path | None, *, special_tokens: Mapping[str, int], what: str) -> Export:
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
        names = as_spelled(names, architecture.written_spelling)
        shapes = {spelled(key, architecture.written_spelling): shape for key, shape in architecture.shapes(graph).items()}
        layout = cut_into_files(names, dtype, is_vector=name_vectors(tensors, names, what=what), given=shapes)
        tokens = {key: special_tokens[name] for name, key in architecture.placeholders.items() if name in special_tokens}
        written = {**config, **tokens, "dtype": str(dtype).removeprefix("torch.")}
        beside = Path(graph.backbone.weights) if graph.backbone.weights is not None else None
        return Export(names, layout, written, beside=beside, processor=architecture.to_processor(graph))
    before = check_same_model(like, graph).backbone.vocab_size or 0
    with failing_together(what=what), WeightFiles(like) as files:
        names = find_weights(files, names, graph=graph, architecture=architecture, vocab_size=before)
        layout = like_files(names, files.weights, files.metadata)
    if (vocab_size := graph.backbone.vocab_size or 0) != before:
        config = with_vocab_size(config, vocab_size)
    return Export(names, layout, config, like=like)


def name_vectors(tensors: Iterable[HeldTensor], names: NamedWeights, *, what: str) -> set[str]:
    """Return the names of tensors with one dimension that all ranks hold together; collective."""
    vectors = on_all_ranks(lambda: [tensor.key for tensor in tensors if len(tensor.shape) == 1], what=what)
    return {rows.key for keys in vectors for key in keys for rows in names.rows[key]}
