"""The first layer of an audio encoder: frames of a spectrogram to hidden states, by two convolutions (Whisper)."""

import math
from typing import Any

import torch
from torch import Tensor

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.values.units.items import FRAMES_PER_TOKEN

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
    """Makes every token from the five frames that it depends on, so tokens need no neighbours; not sharded.

    Outputs of the first convolution that two successive tokens need are computed twice.
    """

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
        return (hidden + self._positions(place, hidden))[:, None]

    def _positions(self, place: Tensor, hidden: Tensor) -> Tensor:
        if self.positions is not None:
            return torch.nn.functional.embedding(place, self.positions)
        return sinusoids(place, hidden.shape[1], dtype=hidden.dtype)


def sinusoids(places: Tensor, num_channels: int, *, dtype: torch.dtype) -> Tensor:
    """Return [num_places, num_channels]: sines, then cosines, of wavelengths up to 2 pi x 10000."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    step = math.log(_MAX_TIMESCALE) / max(1, num_channels // 2 - 1)
    angles = places[:, None].to(wide) * torch.exp(-step * torch.arange(num_channels // 2, device=places.device, dtype=wide))
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(dtype)


class AudioEmbeddingKind(LayerKind):
    """Reads `batch.patches` and `batch.positions`."""

    takes_hidden = False
    fixed = ("positions",)
    module = AudioEmbedding

    def initial_matrix(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the positions: sines and cosines."""
        if name != "positions":
            return None
        return sinusoids(torch.arange(shape[0]), shape[1], dtype=torch.float32)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Frames, all at the first place of their clip."""
        places = torch.zeros(num_tokens, 3, dtype=torch.int64, device=torch.cuda.current_device())
        return {"patches": context.random(num_tokens, context.patch_channels), "positions": places}, None
