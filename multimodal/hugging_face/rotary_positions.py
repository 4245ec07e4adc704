"""Rotary positions of an LLM as config.json describes them, in the forms of all versions of transformers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multimodal.hugging_face.architecture import Config, require
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LENGTH = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_BASE = 10000.0


def _read_yarn(given: Config, head_channels: int, base: float) -> dict[str, Any]:
    """YaRN (Peng et al., 2023): frequencies that turn often stay, those that turn rarely are divided by the factor."""
    factor, length = float(given["factor"]), given[_ORIGINAL]

    def pair_of(num_turns: float) -> float:
        return head_channels * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(given.get("beta_fast") or 32), pair_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_channels - 1)
    width = high - low if high != low else 0.001
    shares = (min(max((pair - low) / width, 0.0), 1.0) for pair in range(head_channels // 2))
    scales = given.get("mscale"), given.get("mscale_all_dim")
    implied = _yarn_scale(factor, scales[0]) / _yarn_scale(factor, scales[1]) if all(scales) else _yarn_scale(factor, 1.0)
    return {
        "rotary_factors": [1.0 / (share / factor + (1.0 - share)) for share in shares],
        "rotary_attention_factor": given.get("attention_factor") or implied,
        "rotary_short_length": length,
    }


def _yarn_scale(factor: float, scale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(scale) * math.log(factor) + 1.0


def _read_longrope(given: Config, head_channels: int, base: float) -> dict[str, Any]:
    """LongRoPE (Ding et al., 2024): one list of factors up to the original length, another one beyond it."""
    original = given[_ORIGINAL]
    factor = given.get("factor") or (given[_LENGTH] or original) / original
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, longer = given["short_factor"], given["long_factor"]
    return {
        "rotary_factors": short,
        "rotary_long_factors": [] if longer == short else longer,
        "rotary_short_length": original,
        "rotary_attention_factor": given.get("attention_factor") or implied,
    }


_READERS: Mapping[str, tuple[Callable[[Config, int, float], dict[str, Any]], Sequence[str]]] = {
    "llama3": (lambda given, *_: {"rotary_scaling": [given[key] for key in _LLAMA3]}, _LLAMA3),
    "dynamic": (lambda given, *_: {"rotary_dynamic_scaling": [given["factor"], given[_LENGTH]]}, ("factor", _LENGTH)),
    "linear": (lambda given, channels, _: {"rotary_factors": [float(given["factor"])] * (channels // 2)}, ("factor",)),
    "yarn": (_read_yarn, ("factor", _ORIGINAL)),
    "longrope": (_read_longrope, ("short_factor", "long_factor", _ORIGINAL)),
}
"""Type -> the function that reads it, and the keys that it needs."""
_NUMBERS = ("factor", _LENGTH, _ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_OTHER_NAMES: Mapping[str | None, str] = {None: "default", "su": "longrope"}


def rotary_entries(config: Config, *, where: str) -> dict[str, Any]:
    """Return the entries of `rope_scaling` and `rope_parameters`, as versions of transformers call them; raises ModelError."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), Mapping | None):
            raise ModelError(f"{where}{key} is {config[key]!r}, expected a mapping, or null; correct it")
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def read_rotary(config: Config, *, where: str) -> dict[str, Any]:
    """Return the fields of rotary positions, wherever transformers puts them; raises ModelError for unsupported ones."""
    parameters = rotary_entries(config, where=where)
    given = parameters.get("rope_type", parameters.get("type"))
    kind = _OTHER_NAMES.get(given, given) if given is None or isinstance(given, str) else None
    if kind is None or (kind != "default" and kind not in _READERS):
        raise ModelError(
            f"{where}rope_parameters (or rope_scaling) are of type {given!r}, which cannot be trained here; expected one of "
            f"'default', {', '.join(map(repr, _READERS))}: take a model whose rotary positions are not scaled otherwise"
        )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    require({"partial_rotary_factor": partial}, {"partial_rotary_factor": (None, 1, 1.0)}, where=where)
    theta = parameters.get("rope_theta") or config.get("rope_theta") or _BASE
    if not isinstance(theta, int | float):
        raise ModelError(f"{where}rope_theta is {theta!r}, expected a number; correct it")
    base = float(theta)
    if kind == "default":
        return {"rotary_base": base}
    read, needed = _READERS[kind]
    given = {_ORIGINAL: config.get(_ORIGINAL), **parameters, _LENGTH: config.get(_LENGTH)}
    if kind in ("yarn", "longrope"):
        given[_ORIGINAL] = given[_ORIGINAL] or given[_LENGTH]
    if missing := [key for key in needed if given.get(key) is None]:
        raise ModelError(f"{where}rope_parameters (or rope_scaling) are of type '{kind}' without {missing[0]}; add it")
    for key in _NUMBERS:
        _check_number(given.get(key), f"{where}{key} of rotary positions")
    for key in ("short_factor", "long_factor"):
        factors = given.get(key)
        if factors is not None and not isinstance(factors, list):
            raise ModelError(f"{where}{key} is {factors!r}, expected a list of numbers; correct it")
        for each in factors or ():
            _check_number(each, f"{where}an entry of {key}")
    sizes = config["hidden_size"], config["num_attention_heads"], config.get("head_dim")
    if not all(isinstance(size, int) and size > 0 for size in sizes if size is not None):
        return {"rotary_base": base}  # the graph's own check names the size
    return {"rotary_base": base, **read(given, sizes[2] or sizes[0] // sizes[1], base)}


def _check_number(value: Any, what: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
        raise ModelError(f"{what} is {value!r}, expected a number above 0; correct it")


def write_rotary(unit: Unit) -> dict[str, Any]:
    """Return the entries of config.json for rotary positions: those of YaRN become LongRoPE's, factor by factor."""
    shape = unit.transformer
    base = {"rope_theta": shape.rotary_base}
    if shape.rotary_scaling:
        values = dict(zip(_LLAMA3, shape.rotary_scaling, strict=True))
        return {**base, "rope_scaling": {**values, "rope_type": "llama3", _ORIGINAL: int(values[_ORIGINAL])}}
    if shape.rotary_dynamic_scaling:
        factor, length = shape.rotary_dynamic_scaling
        return {**base, "rope_scaling": {"factor": factor, "rope_type": "dynamic"}, _LENGTH: int(length)}
    short, longer = (list(each) for each in (shape.rotary_factors, shape.rotary_long_factors))
    if not short:
        return base
    if shape.rotary_short_length is None:
        return {**base, "rope_scaling": {"factor": short[0], "rope_type": "linear"}}
    original = {_ORIGINAL: shape.rotary_short_length}
    factors = {"short_factor": short, "long_factor": longer or short, "attention_factor": shape.rotary_attention_factor}
    return {**base, **original, "rope_scaling": {**factors, **original, "rope_type": "longrope"}}
