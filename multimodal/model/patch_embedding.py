"""An encoder's first layer: flat pixel patches to hidden states."""

import torch
from torch import Tensor

from multimodal.model.deferrable_linear import deferrable_linear
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
