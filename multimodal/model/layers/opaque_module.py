"""A module of Hugging Face's transformers: built from its config.json, tested on one item, with the tensor names of files."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.values.errors import ModelError
from multimodal.values.model_graph import AudioInput, ImageInput, ItemInput, Opaque, Unit

_NUM_TRIED = 8
"""Tokens of the clip that a module is tested with."""


def find_callback(name: str | None) -> Callable[[Tensor], Tensor]:
    """Import `package.module:function`; without a name, return the identity. Raises ModelError."""
    if name is None:
        return lambda values: values
    module, _, function = name.partition(":")
    try:
        found: Callable[[Tensor], Tensor] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ModelError(f"callback {name}: cannot be imported ({problem}); correct it, or put it on PYTHONPATH") from problem
    return found


def argument_of(item: ItemInput) -> str:
    """Return the name of the input argument of transformers' encoders."""
    if isinstance(item, ImageInput):
        return "pixel_values"
    return "input_features" if item.waveform is None else "input_values"


def build_module(unit: Unit, described: Opaque) -> Module:
    """Build the module; raises ModelError if transformers knows no such class, part or config.json."""
    where = f"unit '{unit.name}', module"
    try:
        import transformers
    except ImportError as problem:
        raise ModelError(f"{where}: needs the package 'transformers'; install it with: pip install 'braid[hf]'") from problem
    if not (Path(described.directory) / "config.json").is_file():
        raise ModelError(f"{where}, directory: there is no config.json in {described.directory}; give the folder of a model")
    name = described.class_name or "AutoModel"
    kind = getattr(transformers, name, None)
    is_model = isinstance(kind, type) and (name == "AutoModel" or issubclass(kind, transformers.PreTrainedModel))
    if kind is None or not is_model:
        raise ModelError(f"{where}, class: transformers {transformers.__version__} has no model '{name}'; correct it")
    try:
        config = getattr(kind, "config_class", None) or transformers.AutoConfig
        # Without False, a folder whose config.json names programs (auto_map) has a run ask on stdin, and `yes |` would answer.
        read = config.from_pretrained(described.directory, trust_remote_code=False)
        is_open = name == "AutoModel"
        module = transformers.AutoModel.from_config(read, trust_remote_code=False) if is_open else kind(read)
        part: Module = module.get_submodule(described.part or "")
    except Exception as problem:  # a config.json may cause any error
        raise ModelError(f"{where}: {name} cannot be built from {described.directory}/config.json ({problem})") from problem
    return part


@torch.enable_grad()  # stages for forwards only are built without
def find_unused(unit: Unit, described: Opaque, item: ItemInput) -> frozenset[str]:
    """Return the parameters that get no gradient, such as those of poolers; does not compute any values.

    Raises ModelError if the module does not treat items as an encoder must.
    """
    where = f"unit '{unit.name}', module"
    before, after = find_callback(described.before_encoder), find_callback(described.after_encoder)
    shape, num_tokens = _shape_of_one(item)
    name = "an image" if isinstance(item, ImageInput) else "a clip"
    with torch.device("meta"):
        module = build_module(unit, described).eval()
        try:
            hidden = after(module(**{argument_of(item): before(torch.zeros(1, *shape))}).last_hidden_state)
        except Exception as problem:
            raise ModelError(f"{where}: does not take {name} of {shape} as {argument_of(item)} ({problem})") from problem
    is_exact = isinstance(item, AudioInput) and item.waveform is not None
    fits = hidden.dim() == 3 and hidden.shape[2] == unit.transformer.hidden_size
    if not fits or hidden.shape[1] < num_tokens or (is_exact and hidden.shape[1] > num_tokens):
        raise ModelError(
            f"{where}: gives {list(hidden.shape[1:])} for {name}, but the unit has {num_tokens} tokens of hidden_size "
            f"{unit.transformer.hidden_size}; correct hidden_size, and what 'image' or 'audio' says of tokens"
        )
    hidden.sum().backward()
    return frozenset(name for name, parameter in module.named_parameters() if parameter.grad is None)


def _shape_of_one(item: ItemInput) -> tuple[tuple[int, ...], int]:
    """Return the shape of an image or clip, and its number of tokens."""
    if isinstance(item, ImageInput):
        side = item.grid_size * item.patch_size
        return (item.in_channels, side, side), item.grid_size**2
    if item.waveform is None:
        return (item.num_mel_bins, 2 * item.max_tokens), item.max_tokens
    num_samples = item.waveform.samples_seen + _NUM_TRIED * item.waveform.samples_per_token
    return (num_samples,), item.num_tokens((num_samples, 1))


def rename_keys(unit: Unit, keys: Iterable[str]) -> Mapping[str, str]:
    """Return the module's name for each tensor of a file -> the file's name, as versions of transformers rename tensors."""
    assert unit.module is not None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # older versions do not rename
        return {key: key for key in keys}
    with torch.device("meta"):
        module = build_module(unit, unit.module)
    renamings = [each for each in get_model_conversion_mapping(module) if isinstance(each, WeightRenaming)]
    return {rename_source_key(key, renamings, [])[0]: key for key in keys}
