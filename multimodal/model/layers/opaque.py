"""A module of Hugging Face's transformers as one layer: images or sound in, the hidden states of their tokens out."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.latents import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.values.errors import ModelError, require_package
from multimodal.values.model_graph import AudioInput, ImageInput, ItemInput, Unit
from multimodal.values.units.items import FRAMES_PER_TOKEN
from multimodal.values.units.unit import Opaque

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
    require_package("transformers", extra="hf", needed_by=where, error=ModelError)
    import transformers

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
    """Return the parameters without gradients, such as poolers'; raises ModelError if the module is no encoder of such items."""
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
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    assert unit.module is not None
    with torch.device("meta"):
        module = build_module(unit, unit.module)
    renamings = [each for each in get_model_conversion_mapping(module) if isinstance(each, WeightRenaming)]
    return {rename_source_key(key, renamings, [])[0]: key for key in keys}


_DYNAMIC_RANGE = 2.0
"""Difference between the largest value of a spectrogram and the least, which is that of silence (Whisper)."""


class OpaqueEncoder(torch.nn.Module):
    """Assembles items from tokens, and returns the hidden states of tokens in their order."""

    def __init__(self, module: Module, *, described: Opaque, item: ItemInput, unused: frozenset[str]) -> None:
        """unused: names of parameters in the module that no output depends on."""
        super().__init__()
        self.module, self._item = module, item
        self.fixed = frozenset(f"module.{name}" for name in unused)
        self._before, self._after = find_callback(described.before_encoder), find_callback(described.after_encoder)

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Compute all items; returns [num_tokens, 1, hidden_size]."""
        patches, places, lengths = given.batch.patches, given.batch.positions, given.batch.lengths
        assert patches is not None
        if isinstance(self._item, ImageInput):
            return self._see(patches, places, lengths, image=self._item)[:, None]
        values = patches.to(next(self.module.parameters()).dtype)
        # One clip at a time, as its norms and attention cover all of it, and no clip is padded to another's length.
        return torch.cat([self._hear(clip, audio=self._item) for clip in values.split(lengths)])[:, None]

    def _hear(self, clip: Tensor, *, audio: AudioInput) -> Tensor:
        """clip: [num_tokens, values of a token]; returns [num_tokens, hidden_size]."""
        if audio.waveform is None:
            given = frames_of(clip, audio)
        else:  # tokens overlap
            given = torch.cat((clip[:-1, : audio.waveform.samples_per_token].flatten(), clip[-1]))
        return self._run(given[None])[0, : len(clip)]

    def _run(self, given: Tensor) -> Tensor:
        return self._after(self.module(**{argument_of(self._item): self._before(given)}).last_hidden_state)

    def _see(self, patches: Tensor, places: Tensor, lengths: tuple[int, ...], *, image: ImageInput) -> Tensor:
        """places: [num_tokens, 2], negative for tokens that are not patches; all images at once."""
        size, patch, num_images = image.grid_size, image.patch_size, len(lengths)
        counts = torch.tensor(lengths, device=patches.device)
        image_of_token = torch.arange(num_images, device=counts.device).repeat_interleave(counts, output_size=len(patches))
        is_patch = places[:, 0] >= 0
        index = torch.where(is_patch, places[:, 0] * size + places[:, 1], 0)
        values = normalised_patches(patches, image).to(next(self.module.parameters()).dtype)
        rows = values.new_zeros((num_images * size**2 + 1, values.shape[1]))  # the last row is for tokens that are not patches
        rows[torch.where(is_patch, image_of_token * size**2 + index, num_images * size**2)] = values
        pixels = rows[:-1].view(num_images, size, size, -1, patch, patch).permute(0, 3, 1, 4, 2, 5)
        pixels = pixels.reshape(num_images, -1, size * patch, size * patch)
        hidden = self._run(pixels)
        first_patch = hidden.shape[1] - size**2
        of_token = torch.where(is_patch, index + first_patch, 0)
        return hidden[image_of_token, of_token]


def frames_of(clip: Tensor, audio: AudioInput) -> Tensor:
    """Return a clip's spectrogram with silence behind it, [num_mel_bins, frames of the longest clip].

    clip: [num_tokens, FRAMES_PER_TOKEN * num_mel_bins]; the third and fourth frame are a token's own.
    """
    windows, num_frames = clip.unflatten(1, (FRAMES_PER_TOKEN, -1)), 2 * audio.max_tokens
    frames = torch.cat((windows[:, 2:4].flatten(0, 1), windows[-1:, 4]))[:num_frames]
    silence = (frames.max() - _DYNAMIC_RANGE).expand(num_frames - len(frames), frames.shape[1])
    return torch.cat((frames, silence)).t()


class OpaqueKind(LayerKind):
    """Reads `batch.patches`, `batch.positions` and the lengths of items."""

    initialises_itself = True

    def build(self, context: LayerContext, index: int) -> OpaqueEncoder:
        """Build the module from its config.json, with transformers' initial values, alike on all ranks."""
        described, item = context.unit.module, context.unit.item_input
        assert described is not None and item is not None
        module = context.build_alike(lambda: build_module(context.unit, described))
        return OpaqueEncoder(module, described=described, item=item, unused=find_unused(context.unit, described, item))

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return images, some of whose last patches may be missing (the image then takes as long as a whole one), or clips."""
        if context.unit.audio is not None:
            most = context.unit.audio.max_tokens
            whole, rest = divmod(num_tokens // num_sequences, most)
            lengths = ((most,) * whole + ((rest,) if rest else ())) * num_sequences
            return {"patches": context.random(num_tokens, context.patch_channels), "lengths": lengths}, None
        assert context.unit.image is not None
        size, device = context.unit.image.grid_size, torch.cuda.current_device()
        num_images, rest = divmod(num_tokens, size**2)
        places = torch.cartesian_prod(torch.arange(size, device=device), torch.arange(size, device=device))
        given = {
            "patches": context.random(num_tokens, context.patch_channels),
            "positions": places.repeat(num_images + 1, 1)[:num_tokens],
            "lengths": (size**2,) * num_images + ((rest,) if rest else ()),
        }
        return given, None
