"""An encoder's first layer: flat pixel patches to hidden states."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.transformer_config import Precision


class PatchEmbedding(torch.nn.Module):
    """One linear map per patch, the same on every tensor parallel rank."""

    def __init__(self, *, patch_channels: int, hidden_size: int, precision: Precision) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, patch_channels, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def forward(self, patches: Tensor) -> Tensor:
        """patches: [num_patches, patch_channels], any float dtype; returns [num_patches, 1, hidden_size]."""
        return deferrable_linear(patches.to(self.weight.dtype), self.weight, self.bias)[:, None]


class PatchEmbeddingKind(LayerKind):
    """Reads `batch.patches`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> PatchEmbedding:
        """Build it for the patches of the unit's images."""
        return PatchEmbedding(
            patch_channels=context.patch_channels,
            hidden_size=context.config.hidden_size,
            precision=context.options.precision,
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Embed all patches."""
        embedded: Tensor = layer(given.batch.patches)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Patches."""
        return {"patches": context.random(num_tokens, context.patch_channels)}, None
