"""The first layers of encoders: pixel patches, frames of a spectrogram, or what other encoders make, to hidden states."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.latents import normalised_patches
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.values.model_graph import ImageInput
from multimodal.values.units.items import FRAMES_PER_TOKEN


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
        if self.class_token is not None:
            self.class_token.decays = True  # type: ignore[attr-defined]  # as in Megatron, where it is no vector
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
    """Adds positions interpolated with aligned corners; places: [num_tokens, 4], row, column, and the image's numbers of both."""

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

    def __init__(self, module: type[PatchEmbedding], *, first_place: tuple[int, ...] = ()) -> None:
        """first_place: of an image, where random patches stand; empty: positions are not read."""
        super().__init__(module)
        self.first_place = first_place

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches, all at the first place of their image."""
        found = {"patches": context.random(num_tokens, context.patch_channels)}
        if self.first_place:
            found["positions"] = torch.tensor([self.first_place], device=torch.cuda.current_device()).repeat(num_tokens, 1)
        return found, None


class JoinedTokens(torch.nn.Module):
    """Puts rows of encoders, padded with zeros where they have fewer channels, into their places; has no weights."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.hidden_size, self.dtype = context.unit.transformer.hidden_size, context.options.params_dtype
        self.widths = _widths(context) if context.unit.join == "features" else ()
        """Channels of each encoder, which are concatenated; empty: encoders have equal widths, and separate tokens."""

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Put all rows into their places; returns [num_tokens, 1, hidden_size]."""
        found, rows, sources = given.item_embeddings, given.batch.item_rows, given.batch.item_sources
        assert rows is not None and sources is not None
        num_tokens = given.batch.num_tokens
        if found is None:
            return torch.zeros(num_tokens, 1, self.hidden_size, device=rows.device, dtype=self.dtype)
        if not self.widths:
            return found.new_zeros(num_tokens, self.hidden_size).index_put((rows,), found)[:, None]
        of_source = found.new_zeros(len(self.widths), num_tokens, found.shape[1]).index_put((sources, rows), found)
        parts = zip(of_source, self.widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], dim=-1)[:, None]


class JoinedTokensKind(LayerKind):
    """Reads the outputs of other encoders, `batch.item_rows` and `batch.item_sources`."""

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return random rows: as many of each encoder as there are tokens, or (joined as a sequence) as many of all together."""
        widths, device = _widths(context), torch.cuda.current_device()
        num_sources = len(widths) if context.unit.join == "features" else 1
        rows = torch.arange(num_tokens, device=device).repeat(num_sources)
        sources = torch.arange(num_sources, device=device).repeat_interleave(num_tokens)
        return {"item_rows": rows, "item_sources": sources}, context.random(len(rows), max(widths)).requires_grad_()


def _widths(context: LayerContext) -> tuple[int, ...]:
    graph = context.graph
    names = graph.upstream(context.unit.name)
    return tuple(graph.width_behind(name, len(graph.unit(name).layers) - 1) for name in names)


_TAPS = 3
_MAX_TIMESCALE = 10000


class Convolution(torch.nn.Module):
    """One product for each position of a convolution of width 3."""

    def __init__(self, in_channels: int, context: LayerContext) -> None:
        super().__init__()
        self.weight = context.empty(context.config.hidden_size, in_channels * _TAPS)
        self.bias = context.empty(context.config.hidden_size)

    def forward(self, windows: Tensor) -> Tensor:
        """windows: [..., in_channels, 3]; returns [..., hidden_size], with a GELU."""
        return torch.nn.functional.gelu(deferrable_linear(windows.flatten(-2), self.weight, self.bias))


class AudioEmbedding(torch.nn.Module):
    """Makes every token from its five frames, without neighbours (some outputs are computed twice); not sharded."""

    fixed = frozenset({"positions"})

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        audio, size = context.unit.audio, context.config.hidden_size
        assert audio is not None
        self.chunk_tokens = audio.chunk_tokens
        self.conv1, self.conv2 = Convolution(audio.num_mel_bins, context), Convolution(size, context)
        self.positions = context.empty(audio.num_positions, size) if audio.num_positions else None

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Embed all frames; returns [num_tokens, 1, hidden_size]."""
        frames, places = given.batch.patches, given.batch.positions
        assert frames is not None
        place = places[:, 0] if self.chunk_tokens is None else places[:, 0] % self.chunk_tokens
        windows = frames.to(self.conv1.weight.dtype).unflatten(1, (FRAMES_PER_TOKEN, -1)).unfold(1, _TAPS, 1)
        inner = self.conv1(windows)  # [num_tokens, 3, hidden_size]
        # Outside of the clip or chunk the second convolution reads zeros.
        is_inside = torch.stack((place > 0, torch.ones_like(place, dtype=torch.bool), places[:, 1] > 1), dim=1)
        hidden = self.conv2((inner * is_inside[:, :, None]).transpose(1, 2))
        if self.positions is not None:
            return (hidden + embedding(place, self.positions))[:, None]
        return (hidden + sinusoids(place, hidden.shape[1], dtype=hidden.dtype))[:, None]


def sinusoids(places: Tensor, num_channels: int, *, dtype: torch.dtype) -> Tensor:
    """Return [num_places, num_channels]: sines, then cosines, of wavelengths up to 2 pi x 10000."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    step = math.log(_MAX_TIMESCALE) / max(1, num_channels // 2 - 1)
    angles = places[:, None].to(wide) * torch.exp(-step * torch.arange(num_channels // 2, device=places.device, dtype=wide))
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(dtype)


class AudioEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    def initial_matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the positions: sines and cosines."""
        if name != "positions":
            return None
        return sinusoids(torch.arange(shape[0]), shape[1], dtype=torch.float32)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Frames, all at the first place of their clip."""
        places = torch.zeros(num_tokens, 3, dtype=torch.int64, device=torch.cuda.current_device())
        return {"patches": context.random(num_tokens, context.patch_channels), "positions": places}, None
