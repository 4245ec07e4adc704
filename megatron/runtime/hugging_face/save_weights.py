"""Determines the content of a Hugging Face folder (tensors, names and files), and writes it.

Adapters go into a folder that Hugging Face's PEFT loads. Here they may belong to matrices that combine several of theirs
(queries, keys and values): each of these gets its rows of B, and all have the same A. Trained projectors are stored beside them,
as PEFT's `modules_to_save`, and trained rows of the vocabulary as its `trainable_token_indices`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint.storage import failing_together, on_first_rank
from megatron.runtime.hugging_face.file_layout import cut_into_files, in_one_file, like_files
from megatron.runtime.hugging_face.load_weights import gather_adapters, new_row_tensors
from megatron.runtime.hugging_face.named_weights import NamedWeights, as_spelled, find_weights, name_as_here, name_weights
from megatron.runtime.hugging_face.unit_weights import check_units, is_composed, is_of_projector, is_written_in_parts, name_unit
from megatron.runtime.hugging_face.weight_files import SINGLE_NAME, WeightFiles
from megatron.runtime.hugging_face.write_folder import PIPELINE_INDEX, Export, check_links, copy_pipeline, write_folder
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, merged_tensors, model_tensors
from multimodal.hugging_face.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DOWN_ENDING, PREFIX, TOKENS_ENDING, UP_ENDING
from multimodal.hugging_face.processors import PROCESSOR_NAME, VIDEO_NAME, write_video_processor
from multimodal.hugging_face.registry import CONFIG_NAME, architecture_of, check_same_model, read_config, with_vocab_size
from multimodal.hugging_face.weight_names import spelled
from multimodal.model.adapter import is_adapter, is_new_rows
from multimodal.values.errors import CheckpointError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import Lora, ModelGraph, Role


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
        if unit.role is Role.BACKBONE and (vocab_size := unit.vocab_size or 0) not in (0, config.get("vocab_size")):
            config = with_vocab_size(config, vocab_size)
        yield unit.name, Export(names, layout, {CONFIG_NAME: config}, like=folder), names.rows
    of_projectors = (tensor for tensor in tensors if is_of_projector(session.graph, tensor.key))
    projectors = projectors_export(session, [*of_projectors], what=what)
    yield "projectors", projectors, projectors.names.rows


def projectors_export(session: Session, projectors: Sequence[HeldTensor], *, what: str) -> Export:
    """Return the folder of a composed model's projectors, under their names here; collective."""
    names = name_as_here(projectors, prefix="model.", what=what)
    layout = in_one_file(SINGLE_NAME, names, session.options.build.params_dtype)
    return Export(names, layout, {"model.json": session.graph.to_dict()})


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
        dtype = session.options.build.params_dtype
        names = as_spelled(names, architecture.written_spelling)
        shapes = {spelled(key, architecture.written_spelling): shape for key, shape in architecture.shapes(graph).items()}
        layout = cut_into_files(names, dtype, given=shapes)
        known = {key: value for key, value in special_tokens.items() if key != "video" or value != special_tokens.get("image")}
        tokens = {key: known[name] for name, key in architecture.placeholders.items() if name in known}
        written = {**config, **tokens, "dtype": str(dtype).removeprefix("torch.")}
        beside = Path(graph.backbone.weights) if graph.backbone.weights is not None else None
        processors = {PROCESSOR_NAME: architecture.to_processor(graph), VIDEO_NAME: write_video_processor(graph)}
        described = {CONFIG_NAME: written, **{name: content for name, content in processors.items() if content}}
        return Export(names, layout, described, beside=beside)
    before = check_same_model(like, graph).backbone.vocab_size or 0
    with failing_together(what=what), WeightFiles(like) as files:
        names = find_weights(files, names, graph=graph, architecture=architecture, vocab_size=before)
        layout = like_files(names, files.weights, files.metadata)
    if (vocab_size := graph.backbone.vocab_size or 0) != before:
        config = with_vocab_size(config, vocab_size)
    return Export(names, layout, {CONFIG_NAME: config}, like=like)


def check_adapter_target(folder: Path, *, graph: ModelGraph, like: Path | None) -> None:
    """Raise CheckpointError or ModelError for errors that would only show after training: no place, or unsupported parts."""
    others = [unit.name for unit in graph.units if unit.lora is not None and unit.role is not Role.BACKBONE]
    if is_composed(graph) and others:
        raise CheckpointError(
            f"--save-adapter {folder}: unit '{others[0]}' has adapters, and of units from folders of their own only the LLM's "
            "are written apart; use --save-hf, which adds them to the weights"
        )
    check_hugging_face_target(folder, graph=graph, like=like, flag="--save-adapter")
    architecture = None if is_composed(graph) else read_config(like)[0] if like is not None else architecture_of(graph)
    for unit in graph.units:
        if architecture is not None and unit.lora is not None and not architecture.names_modules(unit):
            raise CheckpointError(
                f"--save-adapter {folder}: unit '{unit.name}' has adapters, and transformers calls its modules otherwise than "
                "their weights in files; use --save-hf, which adds them to the weights"
            )
        if not unit.freeze_module and unit.lora is None:
            raise CheckpointError(
                f"--save-adapter {folder}: unit '{unit.name}' trains all of its weights, and adapters are written with "
                f"projectors alone; freeze it (--freeze {unit.name}), give it adapters, or write the whole model with --save-hf"
            )


def save_adapter(folder: Path, *, session: Session, like: Path | None = None) -> None:
    """Write the adapters, and projectors that are trained; collective.

    like: the folder of the base model. Raises CheckpointError on every rank if it fails on any; there is then no folder.
    """
    what, graph = f"saving to {folder}", session.graph
    session.complete_parameters()
    on_first_rank(lambda: check_adapter_target(folder, graph=graph, like=like), what=what)
    keys = ((tensor, tensor.key.split(".", 4)) for tensor in model_tensors(session.state) if not is_new_rows(tensor.key))
    tensors = [held for held, key in keys if is_adapter(held.key) or graph.unit(key[1]).trains_weights(int(key[3]))]
    if graph.backbone.new_tokens is not None:
        # the trained rows of the vocabulary with what was added to them; collective under ZeRO-3
        unit = session.graph.backbone
        adapters = {
            key: adapter
            for key, adapter in gather_adapters(session).items()
            if key.startswith(f"model.{unit.name}.") and unit.new_rows(unit.layers[int(key.split(".")[3])])
        }
        merged = (tensor for tensor in merged_tensors(session.state, adapters) if tensor.key in adapters)
        tensors += new_row_tensors(merged, range(*unit.new_tokens or (0,)))
    if like is not None or not is_composed(graph):
        export = _describe_adapter(tensors, session, graph=graph, base=like, what=what)
        write_folder(folder, export, session=session, tensors=tensors)
        return
    # a composed model's adapters are written like those of the LLM alone, and its projectors beside them
    unit, own = graph.backbone, [tensor for tensor in tensors if is_adapter(tensor.key)]
    assert unit.weights is not None
    export = _describe_adapter(own, session, graph=ModelGraph((unit,)), base=Path(unit.weights), what=what)
    write_folder(folder / unit.name, export, session=session, tensors=own)
    if any(each.trains_weights(len(each.layers) - 1) for each in graph.encoders):
        projectors = [tensor for tensor in tensors if not is_adapter(tensor.key)]
        export = projectors_export(session, projectors, what=what)
        write_folder(folder / "projectors", export, session=session, tensors=projectors)


def _describe_adapter(
    tensors: Sequence[HeldTensor], session: Session, *, graph: ModelGraph, base: Path | None, what: str
) -> Export:
    architecture = read_config(base)[0] if base is not None else architecture_of(graph)
    names = name_weights(tensors, graph=graph, architecture=architecture, what=what)
    names = as_spelled(names, architecture.module_spelling, prefix=PREFIX)
    layout = in_one_file(ADAPTER_WEIGHTS, names, session.options.build.params_dtype)
    return Export(names, layout, {ADAPTER_CONFIG: adapter_config(names, graph=graph, base=base)})


def adapter_config(names: NamedWeights, *, graph: ModelGraph, base: Path | None) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    modules: dict[str, Lora] = {}
    for key, rows in names.rows.items():
        lora = graph.unit(key.split(".")[1]).lora
        if is_adapter(key) and not is_new_rows(key) and lora is not None:
            modules |= dict.fromkeys(_modules(rows_key.key for rows_key in rows), lora)
    first = next(iter(modules.values()))
    others = {name: lora for name, lora in modules.items() if lora.rank != first.rank or lora.scale != first.scale}
    saved = _modules(rows.key for key, parts in names.rows.items() if not is_adapter(key) for rows in parts)
    of_rows = [rows.key for key, parts in names.rows.items() if is_new_rows(key) for rows in parts]
    tokens = {module.rpartition(".")[2]: list(range(*graph.backbone.new_tokens or ())) for module in _modules(of_rows)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if len(graph.units) == 1 else None,
        "base_model_name_or_path": str(base) if base is not None else None,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "target_modules": list(modules),
        "rank_pattern": {name: lora.rank for name, lora in others.items()},
        "alpha_pattern": {name: lora.scale * lora.rank for name, lora in others.items()},
        "modules_to_save": saved or None,
        **({"trainable_token_indices": tokens} if tokens else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _modules(keys: Iterable[str]) -> Sequence[str]:
    """Return the modules of transformers that have these tensors, each once."""
    found: dict[str, None] = {}
    for key in keys:
        endings = DOWN_ENDING, UP_ENDING, TOKENS_ENDING
        ending = next((each for each in endings if key.endswith(each)), f".{key.rpartition('.')[2]}")
        found[key.removeprefix(PREFIX).removesuffix(ending)] = None
    return list(found)
