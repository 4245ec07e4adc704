"""All families of Hugging Face's models that can be trained here, and the family of a folder or a model graph."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from multimodal.hugging_face.architecture import Architecture, Encoder
from multimodal.hugging_face.diffusion import DENOISERS
from multimodal.hugging_face.encoders import ENCODERS
from multimodal.hugging_face.llava import INTERNVL, LLAVA
from multimodal.hugging_face.processors import processors_of, read_processors, with_processors
from multimodal.hugging_face.qwen import QWEN, QWEN2_5_OMNI, QWEN2_AUDIO
from multimodal.hugging_face.text_families import TEXT_FAMILIES
from multimodal.hugging_face.text_models import text_architecture
from multimodal.values.errors import BraidError, ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph, Role, Unit

CONFIG_NAME = "config.json"
Family = TypeVar("Family", Architecture, Encoder)
ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (*map(text_architecture, TEXT_FAMILIES.values()), LLAVA, *QWEN, INTERNVL, QWEN2_AUDIO, *QWEN2_5_OMNI)
}
"""Families by their name in `architectures` of config.json."""
_FREE = {"name", "freeze_module", "freeze_projector", "vocab_size", "has_exact_vocabulary", "new_tokens"}
_FREE |= {"min_pixels", "max_pixels", "max_tiles", "video"}
"""Fields that a unit may have in any family."""
_OF_CHANNELS = ("mean", "std")
"""Fields with one number for every channel, or one for all."""


def read_config(folder: str | Path) -> tuple[Architecture, dict[str, Any]]:
    """Return the family and the config.json of a folder; raises ModelError for an unknown family."""
    return _find(folder, ARCHITECTURES)


def read_encoder(folder: str | Path, role: Role = Role.ENCODER) -> tuple[Encoder, dict[str, Any]]:
    """Return the family and the config.json of an encoder's folder, or a generator's; raises ModelError for an unknown family."""
    return _find(folder, ENCODERS if role is Role.ENCODER else DENOISERS)


def is_known_encoder(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes an encoder whose layers can be trained here."""
    return _name_of(config) in ENCODERS


def _name_of(config: Mapping[str, Any]) -> Any:
    named = config.get("architectures", [config.get("_class_name")])
    return named[0] if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str) else None


def _find(folder: str | Path, known: Mapping[str, Family]) -> tuple[Family, dict[str, Any]]:
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_NAME}; give a folder of Hugging Face (composed models: --load a run)")
    config = read_mapping(path, error=ModelError)
    name = _name_of(config)
    if name not in known:
        raise ModelError(
            f"{path}: architectures is {config.get('architectures', config.get('_class_name'))!r}, which cannot be trained here; "
            f"expected one of {', '.join(known)}"
        )
    if config.get("quantization_config") is not None:
        raise ModelError(f"{path}: quantization_config: quantised weights cannot be trained; take the model that it was made of")
    for problem in _type_problems(config):
        raise ModelError(f"{path}: {problem}; correct it")
    return known[name], config


def _type_problems(config: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield what is no mapping but should hold the configuration of a part, and what is no whole number but counts something."""
    for key, value in config.items():
        if value is None:
            continue
        if key.endswith("_config"):
            if isinstance(value, Mapping):
                yield from _type_problems(value, f"{place}{key}.")
            else:
                yield f"{place}{key} is {value!r}, expected a mapping"
        elif key.startswith("num_") or key in ("patch_size", "image_size"):
            numbers = value if isinstance(value, list) and value else [value]
            if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
                yield f"{place}{key} is {value!r}, expected a whole number"


def read_graph(folder: str | Path) -> ModelGraph:
    """Return the model graph of a Hugging Face folder; a ModelError names the file and the key."""
    (architecture, config), processors = read_config(folder), read_processors(folder)
    try:
        return ModelGraph.from_dict(with_processors(architecture.to_graph(config), processors))
    except BraidError as problem:
        raise ModelError(f"{Path(folder) / CONFIG_NAME}: {problem}") from None


def check_same_model(folder: str | Path, graph: ModelGraph) -> ModelGraph:
    """Return the model graph of a folder; raises ModelError if it differs from `graph`."""
    described = read_graph(folder)
    difference = _first_difference(graph, described)
    if difference is not None:
        raise ModelError(
            f"{Path(folder) / CONFIG_NAME} is of another model: {difference}; take a model file that says the same, or leave "
            "--model out to take what the folder says"
        )
    return described


def check_same_unit(graph: ModelGraph, unit: Unit) -> None:
    """Raise ModelError if the folder of a composed model's unit describes another unit."""
    assert unit.weights is not None
    if unit.role is Role.BACKBONE:
        check_same_model(unit.weights, ModelGraph((replace(unit, weights=None),)))
        return
    encoder, config = read_encoder(unit.weights, unit.role)
    is_made = unit.role is Role.GENERATOR
    own, llm = {unit.name: encoder.to_unit(config)}, {graph.backbone.name: graph.to_dict()["units"][graph.backbone.name]}
    described = ModelGraph.from_dict({"units": llm | own if is_made else own | llm})
    theirs, mine = (_comparable(each) | _of_made(each) for each in (described.unit(unit.name), unit))
    for key, value in mine.items():
        is_earlier = not is_made and key == "num_layers" and value < theirs[key]  # the output of an earlier layer may be used
        if key in {*asdict(unit.transformer), *_of_made(unit)} and value != theirs[key] and not is_earlier:
            raise ModelError(
                f"{Path(unit.weights) / CONFIG_NAME} is of another model: unit '{unit.name}' would need {key} {theirs[key]}, "
                f"found {value}; correct the model file, or its weights"
            )


def _of_made(unit: Unit) -> dict[str, Any]:
    """Return the form of a generator, and the values of its patches: channels and side, which latents make smaller."""
    if unit.role is not Role.GENERATOR or unit.image is None or unit.flow is None:
        return {}
    channels = unit.image.num_made_channels
    side = math.isqrt(unit.image.num_patch_values // channels)
    return {"form": unit.flow.form, "channels (of pixels or latents)": channels, "patch_size (in values)": side}


def architecture_of(graph: ModelGraph) -> Architecture:
    """Return the family that describes a model graph, or raise ModelError with the changes that are necessary."""
    graph = replace(graph, units=tuple(replace(unit, weights=None) for unit in graph.units))
    differences = []
    for architecture in ARCHITECTURES.values():
        if len(architecture.names) != len(graph.units):
            continue
        difference = _difference_from(architecture, graph)
        if difference is None:
            return architecture
        differences.append(f"for {architecture.name} {difference}")
    raise ModelError(
        "the model is none that Hugging Face's transformers has: "
        f"{'; '.join(differences) or 'no family has as many units'}; it can be saved with --save alone"
    )


def _difference_from(architecture: Architecture, graph: ModelGraph) -> str | None:
    """Return the difference between a model graph and a family that can be written; None if there is none."""
    if architecture.to_config is None:
        return "a folder must be named, like which it is written: --load-hf, or --like"
    expected, found = architecture.items, ["image" if unit.audio is None else "audio" for unit in graph.encoders]
    if expected != found:
        return f"its encoders would have to take {' and '.join(expected) or 'nothing'}, found {' and '.join(found) or 'none'}"
    if module := next((unit.name for unit in graph.encoders if unit.module is not None), None):
        return f"unit '{module}' would need layers, found a module of transformers"
    try:
        plain = architecture.to_graph(architecture.to_config(graph))
        described = ModelGraph.from_dict(with_processors(plain, processors_of(architecture.to_processor(graph))))
    except BraidError as problem:
        return str(problem)
    return _first_difference(graph, described)


def with_vocab_size(config: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return a config.json with another vocabulary size, everywhere it occurs."""
    if "thinker_config" in config:
        return {**config, "thinker_config": with_vocab_size(config["thinker_config"], vocab_size)}
    inner = {"text_config": {**config["text_config"], "vocab_size": vocab_size}} if "text_config" in config else {}
    own = {"vocab_size": vocab_size} if "vocab_size" in config or not inner else {}
    return {**config, **inner, **own}


def _first_difference(graph: ModelGraph, described: ModelGraph) -> str | None:
    roles, expected = ([str(unit.role) for unit in each.units] for each in (graph, described))
    if roles != expected:
        return f"its units would have to be {', '.join(expected)}, found {', '.join(roles)}"
    for unit, other in zip(graph.units, described.units, strict=True):
        mine, theirs = _comparable(unit), _comparable(other)
        for key, value in mine.items():
            if theirs[key] != value:
                return f"unit '{unit.name}' would need {key} {theirs[key]}, found {value}"
    return None


def _comparable(unit: Unit) -> dict[str, Any]:
    """Return a unit's fields without the free ones, and with implied values spelled out."""
    found: dict[str, Any] = {}
    for key, value in asdict(replace(unit, lora=None)).items():
        found |= value if isinstance(value, dict) else {key: value}
    found["num_query_groups"], found["kv_channels"] = unit.transformer.query_groups, unit.transformer.head_channels
    if found["projector_norm"] != "none":
        found["projector_normalization"] = unit.projector_normalization or unit.transformer.normalization
    biases = unit.transformer.biases
    found |= {"add_bias_linear": all(biases.values()), "add_qkv_bias": biases["linear_qkv"]}
    found |= {"add_proj_bias": biases["linear_proj"], "add_mlp_bias": biases["linear_fc1"]}
    if unit.image is not None:
        found |= {key: value * (unit.image.in_channels // len(value)) for key in _OF_CHANNELS if (value := found[key])}
    if found["experts"] is not None:  # their balancing is up to the run
        width = found["experts"]["ffn_hidden_size"] or unit.transformer.ffn_hidden_size
        found["experts"] = {**found["experts"], "ffn_hidden_size": width, "aux_loss_coeff": 0.0}
    return {key: value for key, value in found.items() if key not in _FREE}
