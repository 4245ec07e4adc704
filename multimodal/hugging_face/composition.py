"""Composes a multimodal model from unimodal ones: an LLM and encoders from Hugging Face folders, with new projectors.

Cornstarch, section 5.1: modules stay unchanged; adaptations go between them. The result is a model file for all programs.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.hugging_face.families import FAMILIES
from multimodal.hugging_face.processors import SAMPLING_RATE, read_processors, with_processors
from multimodal.hugging_face.registry import CONFIG_NAME, is_known_encoder, read_encoder, read_graph
from multimodal.values.errors import BraidError, ModelError
from multimodal.values.file_form import read_mapping, write_mapping
from multimodal.values.model_graph import ModelGraph, Role

CALLBACKS = ("before_encoder", "after_encoder", "after_projector")
"""Places between modules where a user's function runs, in the order of a forward."""
PROJECTORS: Mapping[str, str] = {"mlp": "none", "merger": "patches"}
"""Two products with a GELU between them and the LLM's width (LLaVA), or behind a norm with that of merged patches -> the norm."""
_TOWERS = {"clip": "CLIPVisionModel", "siglip": "SiglipVisionModel", "chinese_clip": "ChineseCLIPVisionModel"}
"""Model type of a vision-language model -> class of its vision part."""
_LLM = "llm"
"""The name of the LLM's unit."""
_PATH = ((str, Path), "the path of a folder")
_EXPECTED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "llm": _PATH,
    "encoders": ((Mapping,), "a mapping from the name of each encoder to its folder"),
    "encoders[]": _PATH,
    "generators": ((Mapping,), "a mapping from the name of each generator to its folder"),
    "generators[]": _PATH,
    "freeze": ((Sequence,), "a list of names"),
    "as_modules": ((Sequence,), "a list of names"),
    "callbacks": ((Mapping,), "a mapping from an encoder's name to its functions"),
    "callbacks[]": ((Mapping,), f"a mapping from {', '.join(CALLBACKS)} to 'package.module:function'"),
    "output": ((str, Path), "the path of a file"),
}
"""The types of arguments, and how errors call them; `[]`: of a mapping's values."""
_OF_PROJECTOR = ".projector"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "encoder_layers"),
    "hidden_size": ("hidden_size", "d_model"),
    "num_attention_heads": ("num_attention_heads", "encoder_attention_heads"),
    "ffn_hidden_size": ("intermediate_size", "encoder_ffn_dim"),
}
"""Fields of a unit's shape, with the keys that a config.json may have for each."""
_MOST_TOKENS = 6000
"""Tokens of the longest clip for a module without a limit: two minutes."""
_PARTS = {"whisper": "encoder"}
"""Model type -> the part of the model that encodes sound."""


def compose(
    *,
    llm: str | Path,
    encoders: Mapping[str, str | Path],
    projector: str = "mlp",
    merge_size: int | Mapping[str, int] = 1,
    feature_layer: int | Mapping[str, int] = -1,
    freeze: Sequence[str] = (),
    as_modules: Sequence[str] = (),
    callbacks: Mapping[str, Mapping[str, str]] | None = None,
    generators: Mapping[str, str | Path] | None = None,
    output: str | Path = "model.yaml",
) -> ModelGraph:
    """Write a model file of an LLM behind encoders, before generators, whose weights stay where they are; return its graph.

    llm: the folder of a supported text model; encoders: a unit's name -> the folder of a CLIP, SigLIP, DINOv2 or Whisper, whose
    layers become Braid's, or of another encoder of images of one size or of sound, which is used as a module; projector: one of
    `PROJECTORS`; merge_size: merge_size x merge_size patches become one token, or that many neighbours of sound; feature_layer:
    the layer whose output is used, for image encoders with Braid's layers: -1 for the encoder's output, -2 for the layer before
    the last (LLaVA); both for all encoders, or by unit; freeze: units whose module is not trained, or `<unit>.projector`;
    as_modules: further units that are used as modules, as are those with callbacks; callbacks: unit -> one of `CALLBACKS` -> the
    function, as `package.module:function`; generators: a unit's name -> the folder `transformer` of a Stable Diffusion 3
    or a DiT, which draws latents of the `vae` beside it. Raises ModelError if the parts do not fit.
    """
    given, drawing = callbacks or {}, generators or {}
    paths = {"llm": llm, "encoders": encoders, "generators": drawing, "output": output}
    _check_types({**paths, "freeze": freeze, "as_modules": as_modules, "callbacks": given})
    if not isinstance(projector, str) or projector not in PROJECTORS:
        raise ModelError(f"compose: projector '{projector}' is not known; use one of {', '.join(PROJECTORS)}")
    if taken := {_LLM, *encoders} & {*drawing} | {_LLM} & {*encoders}:
        raise ModelError(f"compose: '{taken.pop()}' names two units; give one another name ('{_LLM}' is the LLM's own)")
    language = _read_language(llm)
    _check_known("as_modules", as_modules, encoders)
    _check_callbacks(given, encoders)
    width = {"projector_hidden_size": language.backbone.transformer.hidden_size} if projector == "mlp" else {}
    sizes = _by_unit("merge_size", merge_size, encoders, default=1)
    layers = _by_unit("feature_layer", feature_layer, encoders, default=-1)
    units: dict[str, dict[str, Any]] = {}
    for name, folder in encoders.items():
        choice: dict[str, Any] = {"as_module": name in {*as_modules, *given}, "merge_size": sizes[name], "layer": layers[name]}
        units[name] = _encoder(name, Path(folder), PROJECTORS[projector], width, **choice)
        if name in given:
            units[name]["module"] |= given[name]
    units[_LLM] = language.to_dict()["units"][language.backbone.name] | {"weights": str(Path(llm).absolute())}
    units |= {name: _generator(name, Path(folder)) for name, folder in drawing.items()}
    _freeze(units, freeze)
    try:
        write_mapping(output, {"units": units})
    except OSError as problem:
        raise ModelError(
            f"compose: output {output} cannot be written ({problem.strerror}); give a path in a folder that is there"
        ) from problem
    return ModelGraph.from_file(output)


def _read_language(llm: str | Path) -> ModelGraph:
    language = read_graph(llm)
    if [unit.role for unit in language.units] != [Role.BACKBONE]:
        raise ModelError(f"compose: llm {llm} has {', '.join(language.unit_names)}; give a text model, without encoders")
    return language


def _freeze(units: dict[str, dict[str, Any]], entries: Sequence[str]) -> None:
    """Mark modules and projectors of units (`compose`, freeze) as not trained."""
    _check_known("freeze", [entry.removesuffix(_OF_PROJECTOR) for entry in entries], units)
    for entry in entries:
        name = entry.removesuffix(_OF_PROJECTOR)
        units[name]["freeze_module" if name == entry else "freeze_projector"] = True


def _check_types(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError if an argument of `compose` is no path, mapping or list, as the name has it."""
    mappings = "encoders", "generators", "callbacks"
    inner = {f"{kind}['{name}']": value for kind in mappings for name, value in _entries(arguments[kind])}
    for name, value in {**arguments, **inner}.items():
        kinds, expected = _EXPECTED[name.partition("[")[0] + "[]" * ("[" in name)]
        is_text = isinstance(value, str) and str not in kinds
        entries = value if name in ("freeze", "as_modules") and not is_text and isinstance(value, Sequence) else ()
        if is_text or not isinstance(value, kinds) or not all(isinstance(each, str) for each in entries):
            raise ModelError(f"compose: {name} is {value!r}, expected {expected}; correct it")


def _check_known(argument: str, names: Iterable[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ModelError(f"compose: {argument} names '{unknown[0]}', which is none of {', '.join(known)}; correct it")


def _check_callbacks(callbacks: Mapping[str, Mapping[str, str]], encoders: Collection[str]) -> None:
    _check_known("callbacks", callbacks, encoders)
    for name, place, function in ((name, *each) for name, functions in callbacks.items() for each in functions.items()):
        if place not in CALLBACKS:
            raise ModelError(f"compose: callbacks of '{name}' have '{place}', expected one of {', '.join(CALLBACKS)}")
        parts = function.replace(":", ".").split(".") if isinstance(function, str) and function.count(":") == 1 else [""]
        if not all(map(str.isidentifier, parts)):
            raise ModelError(f"compose: callback {function!r} of '{name}' is no function; write package.module:function")


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _by_unit(argument: str, value: int | Mapping[str, int], names: Collection[str], *, default: int) -> dict[str, int]:
    _check_known(argument, [name for name, _ in _entries(value)], names)
    if wrong := [each for each in (value.values() if isinstance(value, Mapping) else (value,)) if not isinstance(each, int)]:
        raise ModelError(f"compose: {argument} is {wrong[0]!r}, expected an integer, or one for each encoder by its name")
    return {name: value.get(name, default) if isinstance(value, Mapping) else value for name in names}


def _encoder(
    name: str, folder: Path, norm: str, width: Mapping[str, int], *, as_module: bool, merge_size: int, layer: int
) -> dict[str, Any]:
    where = f"compose: encoder '{name}', {folder / CONFIG_NAME}"
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(f"{where}: there is no such file; give the folder of a model of Hugging Face")
    whole = read_mapping(folder / CONFIG_NAME, error=ModelError)
    is_module = as_module or not is_known_encoder(whole)
    try:
        if is_module:
            unit = {**_module(whole, folder, merge_size=merge_size, where=where), "projector_norm": norm}
        else:
            unit = read_encoder(folder)[0].to_unit(whole)
            kind = "audio" if "audio" in unit else "image"
            unit[kind] |= {"merge": "joined", "merge_factor": merge_size} if kind == "audio" else {"merge_size": merge_size}
        if layer != -1:
            # the encoder ends with one of its layers, whose output passes no norm
            num_layers = unit["num_layers"] + 1 + layer
            if "image" not in unit or "module" in unit or not 1 <= num_layers < unit["num_layers"]:
                raise ModelError(
                    f"feature_layer is {layer}, expected -1, or one from -2 on down to the first where the layers of an encoder "
                    "of images become Braid's; correct it"
                )
            unit = {**unit, "num_layers": num_layers, "projector_norm": "none"}
        if unit["projector_norm"] == "none" and norm != "none":
            unit["projector_norm"] = "merged"  # where it is the encoder's own it is of patches
        described = {**unit, "weights": str(folder.absolute()), **width}
        return dict(with_processors({"units": {name: described}}, read_processors(folder))["units"][name])
    except BraidError as problem:
        hint = "" if is_module else f"; or take it as it is: as_modules=['{name}']"
        raise ModelError(str(problem) if str(problem).startswith(where) else f"{where}: {problem}{hint}") from None


def _generator(name: str, folder: Path) -> dict[str, Any]:
    """Return a generator with the layers of a transformer of diffusers, of latents if there is an autoencoder beside it."""
    try:
        family, config = read_encoder(folder, Role.GENERATOR)
        unit = {**family.to_unit(config), "weights": str(folder.absolute())}
    except BraidError as problem:
        raise ModelError(f"compose: generator '{name}': {problem}; or take it as a module (docs/generator.md)") from None
    beside, factor = folder.absolute().parent / "vae", 1
    if (beside / CONFIG_NAME).is_file():
        image, vae = unit["image"], read_mapping(beside / CONFIG_NAME, error=ModelError)
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        latents = {"directory": str(beside), "channels": image["in_channels"], "factor": factor}
        sizes = {"patch_size": image["patch_size"] * factor, "in_channels": vae["in_channels"]}
        unit["image"] = {**image, **sizes, "latents": latents}
    unit["image"] |= {"min_pixels": unit["image"]["patch_size"] ** 2, "max_pixels": (config["sample_size"] * factor) ** 2}
    return unit


def _module(whole: Mapping[str, Any], folder: Path, *, merge_size: int, where: str) -> dict[str, Any]:
    """Return an encoder of images or sound that is used as a module."""
    config = whole.get("vision_config", whole)
    item = _item(config, merge_size)
    shape = {ours: next((config[key] for key in keys if key in config), None) for ours, keys in _NAMES.items()}
    if shape["ffn_hidden_size"] is None and shape["hidden_size"] is not None:
        shape["ffn_hidden_size"] = int(config.get("mlp_ratio", 4) * shape["hidden_size"])
    values = {_NAMES[key][0]: value for key, value in shape.items()}
    values |= {key: value for each in item.values() for key, value in each.items() if key in ("image_size", "patch_size")}
    missing = [key for key, value in values.items() if not isinstance(value, int)]
    if missing:
        raise ModelError(
            f"{where}: {missing[0]} is {values[missing[0]]!r}, expected an integer; take an encoder of images of one size, or of "
            "sound"
        )
    module = {"directory": str(folder.absolute())}
    if config is not whole:
        if whole.get("model_type") not in _TOWERS:
            raise ModelError(
                f"{where}: model_type {whole.get('model_type')!r} has no tower that is known; expected {', '.join(_TOWERS)}"
            )
        module["class"] = _TOWERS[whole["model_type"]]
    if whole.get("model_type") in _PARTS:
        module["part"] = _PARTS[whole["model_type"]]
    epsilon = {"layernorm_epsilon": config.get("layer_norm_eps", 1e-6)}
    return {"role": "encoder", **shape, **FAMILIES["vit"], **item, "module": module, **epsilon}


def _item(config: Any, merge_size: int) -> dict[str, Any]:
    """Return the description of an encoder's items: samples if convolutions make tokens of them, a spectrogram, or images."""
    widths, steps, channels = given = [config.get(key) for key in ("conv_kernel", "conv_stride", "conv_dim")]
    if all(isinstance(each, list) and each and all(isinstance(number, int) for number in each) for each in given):
        waveform = {"widths": widths, "steps": steps, "channels": max(channels), "is_normalised": True}
        rate = max(1, SAMPLING_RATE // max(1, math.prod(steps)))
        audio = {"waveform": waveform, "tokens_per_second": rate, "max_tokens": _MOST_TOKENS}
    elif isinstance(config.get("num_mel_bins"), int) and isinstance(config.get("max_source_positions"), int):
        audio = {"num_mel_bins": config["num_mel_bins"], "max_tokens": config["max_source_positions"]}
    else:
        image = {key: config.get(key) for key in ("image_size", "patch_size")}
        return {"image": {**image, "in_channels": config.get("num_channels", 3), "merge_size": merge_size}}
    return {"audio": {**audio, "merge": "joined", "merge_factor": merge_size}}
