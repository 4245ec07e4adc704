"""The first layer of a vision encoder: flat pixel patches to hidden states, with learned positions or without."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.inputs.pixels import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.values.model_graph import ImageInput


class PatchEmbedding(torch.nn.Module):
    """One linear map per patch, and perhaps a norm; the same on every tensor parallel rank."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, image = context.config, context.unit.image
        self.image = image  # None for patches of other items, which are normalised
        self.weight = context.empty(config.hidden_size, context.patch_channels)
        self.bias = context.empty(config.hidden_size) if image is None or image.has_patch_bias else None
        if image is not None:
            self._add_tables(image, context)
        whole, has_norm = dataclasses.replace(config, sequence_parallel=False), image is not None and image.has_pre_norm
        self.norm = Norm(whole, config.hidden_size, eps=config.layernorm_epsilon) if has_norm else None

    def _add_tables(self, image: ImageInput, context: LayerContext) -> None:
        """Add the parameters of positions; overridden by embeddings that have some."""

    def _place(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Add positions; hidden: [num_tokens, hidden_size]; places: as each class says."""
        return hidden

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Embed all patches, of which those of class tokens may be anything; returns [num_tokens, 1, hidden_size]."""
        assert given.batch.patches is not None
        values = normalised_patches(given.batch.patches, self.image).to(self.weight.dtype)
        hidden = self._place(deferrable_linear(values, self.weight, self.bias), given.batch.positions)
        return (hidden if self.norm is None else self.norm(hidden))[:, None]


class LearnedPatchEmbedding(PatchEmbedding):
    """Adds class tokens, registers and learned positions, of images of one size; places: [num_tokens, 2]."""

    def _add_tables(self, image: ImageInput, context: LayerContext) -> None:
        size = context.config.hidden_size
        self.class_token = context.empty(size) if image.class_token is not None else None
        self.registers = context.empty(image.num_registers, size) if image.num_registers else None
        self.positions = context.empty(image.num_positions, size)

    def _place(self, hidden: Tensor, places: Tensor) -> Tensor:
        assert self.image is not None
        index = places[:, 0] * self.image.grid_size + places[:, 1]
        if self.class_token is not None:
            is_class = places[:, 0] < 0
            hidden = torch.where(is_class[:, None], self.class_token, hidden)
            index = torch.where(is_class, 0, index + 1)
        hidden = hidden + embedding(index, self._stretched_positions(self.image))
        if self.registers is None:
            return hidden
        number = -2 - places[:, 0]  # register number from 0; the class token's place is -1
        return torch.where((number >= 0)[:, None], embedding(number.clamp(min=0), self.registers), hidden)

    def _stretched_positions(self, image: ImageInput) -> Tensor:
        """Return a position for each patch of an image, behind that of its class token."""
        size = image.position_grid
        if size is None or size == image.grid_size:
            return self.positions
        num_before = len(self.positions) - size**2
        square = self.positions[num_before:].to(torch.promote_types(self.positions.dtype, torch.float32))
        stretched = torch.nn.functional.interpolate(
            square.t().reshape(1, -1, size, size),
            size=(image.grid_size, image.grid_size),
            mode="bicubic",
            antialias=image.num_registers > 0,  # as in models with registers, but not in those without
        )
        return torch.cat((self.positions[:num_before], stretched[0].flatten(1).t().to(self.positions.dtype)))


class StretchedPatchEmbedding(PatchEmbedding):
    """Adds learned positions, interpolated from a square of them to the patches of an image with aligned corners.

    places: [num_tokens, 4], row, column, and the image's numbers of both.
    """

    def _add_tables(self, image: ImageInput, context: LayerContext) -> None:
        assert image.position_grid is not None
        self.grid_size = image.position_grid
        self.positions = context.empty(self.grid_size**2, context.config.hidden_size)

    def _place(self, hidden: Tensor, places: Tensor) -> Tensor:
        low, high, weights = self._between(places)
        for row, row_weight in ((low, 1 - weights), (high, weights)):
            for column, column_weight in ((low, 1 - weights), (high, weights)):
                index = row[:, 0] * self.grid_size + column[:, 1]
                hidden = hidden + embedding(index, self.positions) * (row_weight[:, :1] * column_weight[:, 1:])
        return hidden

    def _between(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the square's rows and columns before and behind each patch, and the weights of the latter."""
        wide = torch.promote_types(self.positions.dtype, torch.float32)
        at = places[:, :2].to(wide) * (self.grid_size - 1) / (places[:, 2:] - 1).clamp(min=1)
        low = at.floor()
        high = (low + 1).clamp(max=self.grid_size - 1)
        return low.long(), high.long(), (at - low).to(self.positions.dtype)


class PatchEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    takes_hidden = False

    def __init__(self, module: type[PatchEmbedding], *, first_place: tuple[int, ...] = ()) -> None:
        """first_place: of an image, where random patches stand; empty: positions are not read."""
        self.module, self.first_place = module, first_place

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches, all at the first place of their image."""
        found = {"patches": context.random(num_tokens, context.patch_channels)}
        if self.first_place:
            found["positions"] = torch.tensor([self.first_place], device=torch.cuda.current_device()).repeat(num_tokens, 1)
        return found, None
