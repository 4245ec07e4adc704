"""The first layers of vision encoders: flat pixel patches to hidden states, with learned positions or without."""

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.model.transformer_config import Precision
from multimodal.values.model_graph import ImageInput


class PatchEmbedding(torch.nn.Module):
    """One linear map per patch, the same on every tensor parallel rank, and perhaps a norm."""

    def __init__(
        self,
        *,
        patch_channels: int,
        hidden_size: int,
        precision: Precision,
        has_bias: bool,
        image: ImageInput | None = None,
        norm: Module | None = None,
    ) -> None:
        super().__init__()
        self.image, self.norm = image, norm
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, patch_channels, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if has_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """patches: [num_patches, patch_channels], bytes or any float dtype; returns [num_patches, 1, hidden_size]."""
        values = normalised_patches(patches, self.image).to(self.weight.dtype)
        hidden = deferrable_linear(values, self.weight, self.bias)
        return (hidden if self.norm is None else self.norm(hidden))[:, None]


class PatchEmbeddingKind(LayerKind):
    """Reads `batch.patches`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> PatchEmbedding:
        """Build it for the patches of the unit's images."""
        image, config = context.unit.image, dataclasses.replace(context.config, sequence_parallel=False)
        has_norm = image is not None and image.has_pre_norm
        return PatchEmbedding(
            patch_channels=context.patch_channels,
            hidden_size=config.hidden_size,
            precision=context.options.precision,
            has_bias=image is None or image.has_patch_bias,
            image=image,
            norm=Norm(config, config.hidden_size, eps=config.layernorm_epsilon) if has_norm else None,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        embedded: Tensor = layer(given.batch.patches)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None


class LearnedPatchEmbedding(torch.nn.Module):
    """Patches, class tokens and registers of images of one size, with learned positions and optionally a norm; no sharding."""

    def __init__(self, *, image: ImageInput, patch_channels: int, config: TransformerConfig) -> None:
        super().__init__()
        device, dtype, hidden_size = torch.cuda.current_device(), config.params_dtype, config.hidden_size

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.image, self.grid_size = image, image.grid_size
        self.weight = parameter(hidden_size, patch_channels)
        self.bias = parameter(hidden_size) if image.has_patch_bias else None
        self.class_token = parameter(hidden_size) if image.class_token is not None else None
        self.registers = parameter(image.num_registers, hidden_size) if image.num_registers else None
        self.positions = parameter(image.num_positions, hidden_size)
        whole = dataclasses.replace(config, sequence_parallel=False)
        self.norm = Norm(whole, hidden_size, eps=config.layernorm_epsilon) if image.has_pre_norm else None

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches: [num_tokens, patch_channels], bytes or any float dtype, anything for class tokens; places: [num_tokens, 2].

        Returns [num_tokens, 1, hidden_size].
        """
        values = normalised_patches(patches, self.image).to(self.weight.dtype)
        hidden = deferrable_linear(values, self.weight, self.bias)
        index = places[:, 0] * self.grid_size + places[:, 1]
        if self.class_token is not None:
            is_class = places[:, 0] < 0
            hidden = torch.where(is_class[:, None], self.class_token, hidden)
            index = torch.where(is_class, 0, index + 1)
        hidden = hidden + torch.nn.functional.embedding(index, self._stretched_positions())
        if self.registers is not None:
            number = -2 - places[:, 0]  # register number from 0; the class token's place is -1
            register = torch.nn.functional.embedding(number.clamp(min=0), self.registers)
            hidden = torch.where((number >= 0)[:, None], register, hidden)
        return (hidden if self.norm is None else self.norm(hidden))[:, None]

    def _stretched_positions(self) -> Tensor:
        """Return a position for each patch of an image, behind that of its class token."""
        size = self.image.position_grid
        if size is None or size == self.grid_size:
            return self.positions
        num_before = len(self.positions) - size**2
        square = self.positions[num_before:].to(torch.promote_types(self.positions.dtype, torch.float32))
        stretched = torch.nn.functional.interpolate(
            square.t().reshape(1, -1, size, size),
            size=(self.grid_size, self.grid_size),
            mode="bicubic",
            antialias=self.image.num_registers > 0,  # as in models with registers, but not in those without
        )
        return torch.cat((self.positions[:num_before], stretched[0].flatten(1).t().to(self.positions.dtype)))


class LearnedPatchEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> LearnedPatchEmbedding:
        """Build it for the one size of the unit's images."""
        assert context.unit.image is not None
        return LearnedPatchEmbedding(image=context.unit.image, patch_channels=context.patch_channels, config=context.config)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        embedded: Tensor = layer(given.batch.patches, given.batch.positions)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches, all at the first place of their image."""
        places = torch.zeros(num_tokens, 2, dtype=torch.int64, device=torch.cuda.current_device())
        return {"patches": context.random(num_tokens, context.patch_channels), "positions": places}, None


class StretchedPatchEmbedding(PatchEmbedding):
    """Adds learned positions, interpolated from a square of them to the patches of an image with aligned corners."""

    def __init__(self, *, grid_size: int, hidden_size: int, precision: Precision, **patches: Any) -> None:
        super().__init__(hidden_size=hidden_size, precision=precision, **patches)
        self.grid_size, shape = grid_size, (grid_size**2, hidden_size)
        self.positions = torch.nn.Parameter(torch.empty(shape, device=self.weight.device, dtype=precision.params_dtype))

    def add_positions(self, hidden: Tensor, places: Tensor) -> Tensor:
        """hidden: [num_tokens, 1, hidden_size]; places: [num_tokens, 4], row, column, and the image's numbers of both."""
        low, high, weights = self._between(places)
        for row, row_weight in ((low, 1 - weights), (high, weights)):
            for column, column_weight in ((low, 1 - weights), (high, weights)):
                index = row[:, 0] * self.grid_size + column[:, 1]
                share = row_weight[:, :1] * column_weight[:, 1:]
                hidden = hidden + (torch.nn.functional.embedding(index, self.positions) * share)[:, None]
        return hidden

    def _between(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the square's rows and columns before and behind each patch, and the weights of the latter."""
        wide = torch.promote_types(self.positions.dtype, torch.float32)
        at = places[:, :2].to(wide) * (self.grid_size - 1) / (places[:, 2:] - 1).clamp(min=1)
        low = at.floor()
        high = (low + 1).clamp(max=self.grid_size - 1)
        return low.long(), high.long(), (at - low).to(self.positions.dtype)


class StretchedPatchEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> StretchedPatchEmbedding:
        """Build it for the unit's square of positions."""
        image = context.unit.image
        assert image is not None and image.position_grid is not None
        return StretchedPatchEmbedding(
            grid_size=image.position_grid,
            hidden_size=context.config.hidden_size,
            precision=context.options.precision,
            patch_channels=context.patch_channels,
            has_bias=image.has_patch_bias,
            image=image,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        assert isinstance(layer, StretchedPatchEmbedding)
        return layer.add_positions(layer(given.batch.patches), given.batch.positions)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches, all at the first place of an image of 16 x 16."""
        places = torch.tensor([[0, 0, 16, 16]], device=torch.cuda.current_device()).repeat(num_tokens, 1)
        return {"patches": context.random(num_tokens, context.patch_channels), "positions": places}, None
