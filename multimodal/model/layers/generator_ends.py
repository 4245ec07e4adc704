"""A generator's first and last layer, or in place of all its layers a denoiser of the diffusers library."""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from multimodal.model.collectives import RankLink, TensorParallelWaits, gather_rows
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.latents import NUM_TIMES, ItemsMade, NoisePath, cut_image, join_patches, mix_weights, normalised_patches
from multimodal.model.layers.layer_kind import HeadOutput, LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.model.stage_input import PackedInput, pad_channels
from multimodal.values.errors import ModelError, require_package
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ImageInput, Unit
from multimodal.values.units.unit import Flow


class ConditionProjector(torch.nn.Module):
    """One linear map from the LLM's hidden size, the same on every tensor parallel rank."""

    def __init__(self, context: LayerContext, *, width: int | None = None) -> None:
        """width: of its results; None: the generator's."""
        super().__init__()
        self.condition_size = context.condition_size
        self.weight = context.empty(width or context.config.hidden_size, context.condition_size)
        self.bias = context.empty(width or context.config.hidden_size)

    def project(self, conditions: Tensor) -> Tensor:
        """conditions: [num_conditions, condition_size or more]; channels beyond are for the LLM's first layers (deepstack)."""
        return deferrable_linear(conditions[:, : self.condition_size].to(self.weight.dtype), self.weight, self.bias)


class NoisyPatches(torch.nn.Module):
    """A linear map of (1 - t) data + t noise, the same on every tensor parallel rank."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.image, self.flow, self.wide = context.unit.image, context.unit.flow, context.options.rotary_dtype
        self.weight = context.empty(context.config.hidden_size, context.patch_channels)

    def forward(self, hidden: Tensor, batch: PackedInput) -> Tensor:
        """Return hidden states, [num_tokens, hidden_size], with the noisy patches added at their rows."""
        assert batch.patches is not None and batch.path is not None
        rows = torch.arange(len(batch.patches), device=hidden.device) if batch.target_rows is None else batch.target_rows
        noisy = mixed_patches(self.image, self.flow, batch, dtype=self.wide)
        return hidden.index_add(0, rows, deferrable_linear(noisy.to(hidden.dtype), self.weight, None))


def mixed_patches(image: ImageInput | None, flow: Flow | None, batch: PackedInput, *, dtype: torch.dtype) -> Tensor:
    """Return the patches with the noise of their items' times, [num_patches, patch_channels]."""
    assert flow is not None and batch.patches is not None and batch.path is not None and batch.path.noise is not None
    weights = mix_weights(flow, batch.path.times.to(dtype)).index_select(0, batch.items_of_patches)
    return weights[:, :1] * normalised_patches(batch.patches, image).to(dtype) + weights[:, 1:2] * batch.path.noise.to(dtype)


class GeneratorProjector(ConditionProjector):
    """A linear map of the LLM's hidden state, and one of each encoder's outputs, plus fixed features of the position.

    All patches of an image start from the same hidden state of the LLM; without features of the position they would stay equal in
    every layer, since rotary angles change nothing if all values are equal.
    """

    def __init__(self, context: LayerContext, *, width: int | None = None) -> None:
        super().__init__(context, width=width)
        unit, graph = context.unit, context.graph
        self.rotary_base, self.feature_dtype = unit.transformer.rotary_base, context.options.rotary_dtype
        has_own = unit.flow is not None and (unit.module is not None or unit.flow.form is not None)
        self.noisy = None if unit.flow is None or has_own else NoisyPatches(context)
        self.sources = tuple("" if name == graph.backbone.name else name for name in graph.upstream(unit.name))
        """The units that feed this one, in the order of the model's edges; the empty name stands for the LLM."""
        encoders = (name for name in self.sources if name)
        self.encoders = torch.nn.ModuleDict({f"{name}_tokens": ConditionProjector(context, width=width) for name in encoders})

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Spread every image's condition over its patches, and put the tokens of encoders and of the LLM before them.

        Returns [num_tokens, 1, hidden_size], the same on every tensor parallel rank.
        """
        conditions, batch = given.item_embeddings, given.batch
        assert conditions is not None and batch.condition_rows is not None
        projected = self.project_all(conditions, batch.item_sources)
        width, dtype = projected.shape[-1], self.feature_dtype
        features = position_features(batch.positions, hidden_size=width, base=self.rotary_base, dtype=dtype).to(projected.dtype)
        spread = projected.index_select(0, batch.condition_rows)
        if batch.path is None:
            return (spread + features)[:, None]
        told = batch.path.is_told.to(spread.dtype).index_select(0, batch.path.items)
        if self.noisy is None:  # what follows has positions and noise of its own
            return (spread * told[:, None])[:, None]
        hidden: Tensor = self.noisy(torch.addcmul(features, spread, told[:, None]), batch)
        return hidden[:, None]

    def project_all(self, conditions: Tensor, sources: Tensor | None) -> Tensor:
        """Apply every map to all rows, then select, so that no host waits; sources: as `item_sources`, None: all of the LLM."""
        projected = self.project(conditions)
        if sources is None:
            return projected
        for number, name in enumerate(self.sources):
            if name:
                projector: ConditionProjector = self.encoders[f"{name}_tokens"]  # type: ignore[assignment]
                projected = torch.where((sources == number)[:, None], projector.project(conditions), projected)
        return projected


def position_features(positions: Tensor, *, hidden_size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines of row and column at geometric frequencies, as diffusion transformers use them (DiT, section 3).

    positions: [num_tokens, 2], integers; base: ratio of the highest to the lowest frequency.
    Shape: [num_tokens, hidden_size] in `dtype`: a quarter each for sines and cosines of rows and columns, zeros for the rest.
    """
    num_frequencies = hidden_size // 4
    exponent = torch.arange(num_frequencies, device=positions.device, dtype=dtype) / max(1, num_frequencies)
    angles = positions.to(dtype)[:, :, None] / base**exponent  # [num_tokens, 2, num_frequencies]
    features = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(1)
    return torch.nn.functional.pad(features, (0, hidden_size - features.shape[1]))


class GeneratorProjectorKind(LayerKind):
    """Reads `batch.condition_rows` and `item_sources`; `DiffusionEmbedding` also `patches`, `path` and `items_made`."""

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return one condition for each image."""
        rows = torch.arange(num_sequences, device=torch.cuda.current_device()).repeat_interleave(num_tokens // num_sequences)
        given = context.random(num_sequences, context.condition_size).requires_grad_()
        return {"condition_rows": rows, **random_path(context, num_tokens, num_sequences)}, given


class GeneratorLoss(torch.nn.Module, ABC):
    """Base of the last layers of generators, which predict patches, or the noise - patches of a flow."""

    waits: TensorParallelWaits | None = None

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.image, self.flow, self.group = context.unit.image, context.unit.flow, context.groups.tp
        self.is_sequence_sharded = context.config.sequence_parallel

    @abstractmethod
    def predict(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Return the values of the patches of this rank, [num_patches, patch_channels]; hidden: as in `forward`."""

    def forward(self, hidden: Tensor, given: StagePass) -> HeadOutput:
        """Sum the errors of patches, or of noise - patches; hidden: [num_tokens (padded and / tp), 1, hidden_size]."""
        patches, path = given.batch.patches, given.batch.path
        assert patches is not None
        predicted = self.predict(hidden, given)
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        target = normalised_patches(patches, self.image).to(wide.dtype)
        if path is not None:
            assert path.noise is not None and self.flow is not None
            weights = mix_weights(self.flow, path.times.to(wide.dtype)).index_select(0, given.batch.items_of_patches)
            target = weights[:, 2:3] * target + weights[:, 3:] * path.noise.to(wide.dtype)
        errors = (wide - target).square()
        if (counted := given.batch.target_weights) is not None:
            errors = errors * counted.to(errors.dtype)[:, None]
        return HeadOutput(errors.sum(), None, predicted=None if self.training else wide.detach())


class GeneratorHead(GeneratorLoss):
    """One linear map from a hidden state to the pixels of its patch, the same on every tensor parallel rank."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        config = context.config
        self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.weight = context.empty(context.patch_channels, config.hidden_size)
        self.bias = context.empty(context.patch_channels)

    def predict(self, hidden: Tensor, given: StagePass) -> Tensor:
        """Map the hidden states of patches."""
        patches, rows = given.batch.patches, given.batch.target_rows
        assert patches is not None
        hidden = gather_rows(self.norm(hidden), RankLink(self.group, self.is_sequence_sharded, self.waits))
        hidden = hidden[: len(patches), 0] if rows is None else hidden[:, 0].index_select(0, rows)
        return deferrable_linear(hidden, self.weight, self.bias)


class GeneratorHeadKind(LayerKind):
    """Compares with `batch.patches`, at `batch.target_rows`."""

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return target patches."""
        patches = context.random(num_tokens, context.patch_channels)
        return {"patches": patches, **random_path(context, num_tokens, num_sequences)}, None


def random_path(context: LayerContext, num_tokens: int, num_sequences: int) -> dict[str, Any]:
    """Return random values of PackedInput that generators read which learn a flow; none for others."""
    if context.unit.flow is None:
        return {}
    patches = context.random(num_tokens, context.patch_channels)
    items = torch.arange(num_sequences, device=patches.device).repeat_interleave(num_tokens // num_sequences)
    times = context.random(num_sequences).float().sigmoid()
    return {"patches": patches, "path": NoisePath(times, torch.ones_like(times), items, torch.randn_like(patches))}


_CLASSES = "UNet2DConditionModel", "SD3Transformer2DModel", "DiTTransformer2DModel"


class Denoiser(GeneratorLoss):
    """Assembles items from patches, and predicts those of one size together."""

    def __init__(self, module: Module, context: LayerContext) -> None:
        super().__init__(context)
        self.module, self.wide = module, context.options.rotary_dtype

    def predict(self, hidden: Tensor, given: StagePass) -> Tensor:
        """hidden: [num_tokens (padded), 1, hidden_size], conditions before each item, and its last one in all of its patches."""
        batch = given.batch
        assert batch.path is not None and batch.items_made is not None and self.image is not None
        grids, places = batch.items_made.grids, batch.items_made.places
        counts = [math.prod(grid) for grid in grids]
        mixed = mixed_patches(self.image, self.flow, batch, dtype=self.wide)
        conditions = hidden[: sum(batch.lengths), 0].split(batch.lengths)
        alike: dict[tuple[tuple[int, int], int], list[int]] = {}
        for item, (grid, length) in enumerate(zip(grids, batch.lengths, strict=True)):
            alike.setdefault((grid, length), []).append(item)
        found: dict[int, Tensor] = {}
        own = list(zip(mixed.split(counts), places.split(counts), grids, strict=True))
        for (grid, length), items in alike.items():
            images = torch.stack([join_patches(*own[item], channels=self.image.num_made_channels) for item in items])
            told = torch.stack([conditions[item][: length - math.prod(grid) + 1] for item in items])
            made = _predict(self.module, images.to(hidden.dtype), batch.path.times[items] * NUM_TIMES, told)
            found |= {item: cut_image(each, own[item][1], grid) for item, each in zip(items, made, strict=True)}
        return torch.cat([found[item] for item in range(len(grids))]) if grids else hidden[:0, 0, :1].expand_as(mixed)


def _predict(module: Any, images: Tensor, times: Tensor, told: Tensor) -> Tensor:
    """images: [num_items, channels, height, width]; times: [num_items]; told: [num_items, num_conditions, hidden_size]."""
    pooled = getattr(module.config, "pooled_projection_dim", None)
    if hasattr(module.config, "num_embeds_ada_norm"):
        if images.shape[2] != images.shape[3]:
            sides = f"{images.shape[3]} x {images.shape[2]}"
            raise ModelError(f"a DiTTransformer2DModel makes squares, and an item has {sides} values; leave such items out")
        made: Tensor = module(images, times, told[:, -1]).sample[:, : images.shape[1]]  # behind these are variances
    elif pooled is None:
        made = module(images, times, told).sample
    else:
        last = pad_channels(told[:, -1], max(pooled, told.shape[2]))[:, :pooled]
        made = module(images, told, last, times.to(images.dtype)).sample
    return made


class DenoiserKind(LayerKind):
    """Reads `batch.patches`, `batch.path` and `batch.items_made`."""

    initialises_itself = True

    def build(self, context: LayerContext, index: int) -> Denoiser:
        """Build the module from its config.json, with diffusers' initial values, alike on all ranks."""
        return Denoiser(context.build_alike(lambda: _build(context.unit)), context)

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
    require_package("diffusers", extra="diffusion", needed_by=where, error=ModelError)
    import diffusers

    config = read_mapping(Path(unit.module.directory) / "config.json", error=ModelError)
    name = unit.module.class_name or config.get("_class_name")
    if name not in _CLASSES:
        raise ModelError(f"{where}, class: {name} is not known as a generator's; give the folder of one of {', '.join(_CLASSES)}")
    try:
        module: Any = getattr(diffusers, name)(**{key: value for key, value in config.items() if not key.startswith("_")})
    except Exception as problem:  # a config.json may cause any error
        raise ModelError(f"{where}: {name} cannot be built from {unit.module.directory}/config.json ({problem})") from problem
    for part in module.modules() if name == _CLASSES[2] else ():
        if hasattr(part, "embedding_table"):  # of classes, the last of which is none: a condition is added to that one's vector
            part.forward = lambda condition, part=part: part.embedding_table.weight[-1] + condition
    channels = unit.image.num_made_channels
    of_heads = config.get("num_attention_heads", 0) * config.get("attention_head_dim", 0) if name == _CLASSES[2] else None
    width = config.get("cross_attention_dim", config.get("joint_attention_dim", of_heads))
    for key, own, theirs in (("hidden_size", unit.transformer.hidden_size, width), ("channels", channels, config["in_channels"])):
        if own != theirs:
            raise ModelError(f"{where}: {key} is {own}, but the module in {unit.module.directory} takes {theirs}; set it to that")
    return module


def _keep(kept: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """Note a tensor that a forward keeps, one for each storage."""
    kept.setdefault(tensor.untyped_storage()._cdata, tensor)
    return tensor


_COUNTED_SIDES = 1, 2, 3
"""Patches along the sides of the items whose operations are counted."""


def count_operations(unit: Unit) -> Unit:
    """Return a generator whose `module` has its operations, its weights, and the values that it keeps for a backward.

    Torch counts them on no device; attention keeps its results, as fused kernels do. Raises ModelError.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # which no run needs to import

    assert unit.module is not None and unit.image is not None
    image, found = unit.image, []
    with FakeTensorMode():
        module = _build(unit).eval()
        own = {each.untyped_storage()._cdata for each in module.parameters()}
        for side in _COUNTED_SIDES:
            pixels, kept = side * math.isqrt(image.num_patch_values // image.num_made_channels), dict[int, Tensor]()
            told = torch.empty(1, unit.num_conditions, unit.transformer.hidden_size)
            given = torch.empty(1, image.num_made_channels, pixels, pixels), torch.zeros(1), told
            with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                _predict(module, *given)
            with saved_tensors_hooks(partial(_keep, kept), lambda each: each):
                _predict(module, *given)
            num_bytes = sum(each.untyped_storage().nbytes() for key, each in kept.items() if key not in own)
            found.append((counter.get_total_flops(), num_bytes / torch.float32.itemsize))
    counts = np.array(_COUNTED_SIDES, dtype=float) ** 2
    solved = np.linalg.solve(np.vander(counts, increasing=True), np.array(found, dtype=float))
    operations, kept_values = solved.round().clip(0).T.tolist()
    num_weights = sum(parameter.numel() for parameter in module.parameters())
    counted: dict[str, Any] = {"operations": tuple(operations), "num_weights": num_weights, "kept_values": tuple(kept_values)}
    return replace(unit, module=replace(unit.module, **counted))
