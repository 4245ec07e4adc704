"""An unchanged module of diffusers as a generator's last layer: from noisy items and conditions to what a flow asks for."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.inputs.latents import ItemsMade, cut_image, join_patches
from multimodal.model.inputs.noise_paths import NUM_TIMES, mix_weights
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.generator_ends import random_path
from multimodal.model.layers.layer_kind import HeadOutput, LayerContext, LayerKind, StagePass
from multimodal.model.stage_input import pad_channels
from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import Unit

_CLASSES = "UNet2DConditionModel", "SD3Transformer2DModel"


class Denoiser(torch.nn.Module):
    """Assembles items from patches, and predicts those of one size together. Dropout is off."""

    def __init__(self, module: Module, context: LayerContext) -> None:
        super().__init__()
        assert context.unit.image is not None and context.unit.flow is not None
        self.module, self.image, self.flow = module, context.unit.image, context.unit.flow
        self.wide = context.options.precision.rotary_dtype

    def train(self, mode: bool = True) -> "Denoiser":
        """Keep the module in inference mode."""
        super().train(mode)
        self.module.eval()
        return self

    def forward(self, hidden: Tensor, given: StagePass) -> HeadOutput:
        """hidden: [num_tokens (padded), 1, hidden_size], conditions before each item, and its last one in all of its patches."""
        batch = given.batch
        assert (
            batch.patches is not None and batch.path is not None and batch.path.noise is not None and batch.items_made is not None
        )
        data, noise = normalised_patches(batch.patches, self.image).to(self.wide), batch.path.noise.to(self.wide)
        grids, places = batch.items_made.grids, batch.items_made.places
        counts = [math.prod(grid) for grid in grids]
        weights = mix_weights(self.flow, batch.path.times.to(self.wide))
        of_patches = weights.repeat_interleave(torch.tensor(counts, device=data.device), dim=0, output_size=len(data))
        mixed = of_patches[:, :1] * data + of_patches[:, 1:2] * noise
        target = of_patches[:, 2:3] * data + of_patches[:, 3:] * noise
        conditions = hidden[: sum(batch.lengths), 0].split(batch.lengths)
        alike: dict[tuple[tuple[int, int], int], list[int]] = {}
        for item, (grid, length) in enumerate(zip(grids, batch.lengths, strict=True)):
            alike.setdefault((grid, length), []).append(item)
        found: dict[int, Tensor] = {}
        own = list(zip(mixed.split(counts), places.split(counts), grids, strict=True))
        for (grid, length), items in alike.items():
            images = torch.stack([join_patches(*own[item], channels=self.image.num_made_channels) for item in items])
            told = torch.stack([conditions[item][: length - math.prod(grid) + 1] for item in items])
            made = self._predict(images.to(hidden.dtype), batch.path.times[items] * NUM_TIMES, told)
            found |= {item: cut_image(each, own[item][1], grid) for item, each in zip(items, made, strict=True)}
        predicted = torch.cat([found[item] for item in range(len(grids))]) if grids else hidden[:0, 0, :1].expand_as(data)
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        return HeadOutput((wide - target.to(wide.dtype)).square().sum(), None, predicted=None if self.training else wide.detach())

    def _predict(self, images: Tensor, times: Tensor, told: Tensor) -> Tensor:
        """images: [num_items, channels, height, width]; times: [num_items]; told: [num_items, num_conditions, hidden_size]."""
        pooled = getattr(self.module.config, "pooled_projection_dim", None)
        if pooled is None:
            made: Tensor = self.module(images, times, told).sample
        else:
            last = pad_channels(told[:, -1], max(pooled, told.shape[2]))[:, :pooled]
            made = self.module(images, told, last, times.to(images.dtype)).sample
        return made


class DenoiserKind(LayerKind):
    """Reads `batch.patches`, `batch.path` and `batch.items_made`."""

    gives_loss = True
    initialises_itself = True

    def build(self, context: LayerContext, index: int) -> Denoiser:
        """Build the module from its config.json, with diffusers' initial values, alike on all ranks."""
        seed = int.from_bytes(hashlib.sha256(context.unit.name.encode()).digest()[:7], "little")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _build(context.unit)
        dtype = context.options.precision.params_dtype
        module = Module.to(module, device=torch.cuda.current_device(), dtype=dtype)  # diffusers' own warns without a reason
        return Denoiser(module, context)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return items of one row of patches each."""
        length, device = num_tokens // num_sequences, torch.cuda.current_device()
        places = torch.stack((torch.zeros(length, dtype=torch.long), torch.arange(length)), 1).repeat(num_sequences, 1)
        made = ItemsMade(((1, length),) * num_sequences, places.to(device), torch.arange(len(places), device=device))
        lengths = (length,) * num_sequences
        return {"lengths": lengths, "items_made": made, **random_path(context, len(places), num_sequences)}, None


def _build(unit: Unit) -> Module:
    """Build the module of a unit; raises ModelError if it is none of the classes that are known, or does not fit the unit."""
    assert unit.module is not None and unit.image is not None
    where = f"unit '{unit.name}', module"
    try:
        import diffusers
    except ImportError as problem:
        raise ModelError(f"{where}: needs the package 'diffusers'; install it with: pip install 'braid[diffusion]'") from problem
    config = read_mapping(Path(unit.module.directory) / "config.json", error=ModelError)
    name = unit.module.class_name or config.get("_class_name")
    if name not in _CLASSES:
        raise ModelError(f"{where}, class: {name} is not known as a generator's; give the folder of one of {', '.join(_CLASSES)}")
    try:
        module: Any = getattr(diffusers, name)(**{key: value for key, value in config.items() if not key.startswith("_")})
    except Exception as problem:  # a config.json may cause any error
        raise ModelError(f"{where}: {name} cannot be built from {unit.module.directory}/config.json ({problem})") from problem
    channels = unit.image.num_made_channels
    width = config.get("cross_attention_dim", config.get("joint_attention_dim"))
    for key, own, theirs in (("hidden_size", unit.transformer.hidden_size, width), ("channels", channels, config["in_channels"])):
        if own != theirs:
            raise ModelError(f"{where}: {key} is {own}, but the module in {unit.module.directory} takes {theirs}; set it to that")
    return module
