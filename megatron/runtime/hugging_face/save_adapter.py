"""Writes adapters into a folder that Hugging Face's PEFT loads: adapter_model.safetensors, adapter_config.json.

Adapters here may belong to matrices that combine several of theirs (queries, keys and values): each of these gets its rows of B,
and all have the same A. Trained projectors are stored beside them, as PEFT's `modules_to_save`, and trained rows of the
vocabulary as its `trainable_token_indices`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint.all_ranks import on_first_rank
from megatron.runtime.hugging_face.adapters import gather_adapters, new_row_tensors
from megatron.runtime.hugging_face.file_layout import in_one_file
from megatron.runtime.hugging_face.named_weights import NamedWeights, as_spelled, name_weights
from megatron.runtime.hugging_face.save_weights import check_hugging_face_target, name_vectors, projectors_export
from megatron.runtime.hugging_face.unit_weights import is_composed
from megatron.runtime.hugging_face.write_folder import Export, write_folder
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, merged_tensors, model_tensors
from multimodal.hugging_face.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DOWN_ENDING, PREFIX, TOKENS_ENDING, UP_ENDING
from multimodal.hugging_face.registry import architecture_of, read_config
from multimodal.model.adapter import is_adapter, is_new_rows
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import Lora, ModelGraph, Role


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
    for unit in graph.units:
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
        tensors += _new_rows(session)
    if like is None and is_composed(graph):
        _save_parts(folder, session=session, tensors=tensors, what=what)
        return
    export = _prepare(tensors, session, graph=graph, base=like, what=what)
    write_folder(folder, export, session=session, tensors=tensors)


def _new_rows(session: Session) -> list[HeldTensor]:
    """Return the trained rows of the vocabulary with what was added to them; collective under ZeRO-3."""
    unit = session.graph.backbone
    adapters = {
        key: adapter
        for key, adapter in gather_adapters(session).items()
        if key.startswith(f"model.{unit.name}.") and unit.new_rows(unit.layers[int(key.split(".")[3])])
    }
    merged = (tensor for tensor in merged_tensors(session.state, adapters) if tensor.key in adapters)
    return new_row_tensors(merged, range(*unit.new_tokens or (0,)))


def _save_parts(folder: Path, *, session: Session, tensors: Sequence[HeldTensor], what: str) -> None:
    """Write a composed model's adapters like those of the LLM alone, and its projectors beside them."""
    unit = session.graph.backbone
    assert unit.weights is not None
    base, own = Path(unit.weights), [tensor for tensor in tensors if is_adapter(tensor.key)]
    export = _prepare(own, session, graph=ModelGraph((unit,)), base=base, what=what)
    write_folder(folder / unit.name, export, session=session, tensors=own)
    if any(each.trains_weights(len(each.layers) - 1) for each in session.graph.encoders):
        projectors = [tensor for tensor in tensors if not is_adapter(tensor.key)]
        export = projectors_export(session, projectors, what=what)
        write_folder(folder / "projectors", export, session=session, tensors=projectors)


def _prepare(tensors: Sequence[HeldTensor], session: Session, *, graph: ModelGraph, base: Path | None, what: str) -> Export:
    architecture = read_config(base)[0] if base is not None else architecture_of(graph)
    names = name_weights(tensors, graph=graph, architecture=architecture, what=what)
    names = as_spelled(names, architecture.module_spelling, prefix=PREFIX)
    dtype = session.options.build.precision.params_dtype
    layout = in_one_file(ADAPTER_WEIGHTS, names, dtype, is_vector=name_vectors(tensors, names, what=what))
    return Export(names, layout, adapter_config(names, graph=graph, base=base), ADAPTER_CONFIG)


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
