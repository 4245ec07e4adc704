"""A generator's first layer: what the LLM says of an image, and where in it each patch is to be."""

import torch
from torch import Tensor

from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.patch_positions import position_features
from multimodal.model.transformer_config import Precision


class GeneratorProjector(torch.nn.Module):
    """One linear map from the LLM's hidden size, the same on every tensor parallel rank, plus fixed features of the position.

    All patches of an image start from the same hidden state of the LLM; without the position's features they would stay alike
    in every layer, as rotary angles change nothing where all values are the same.
    """

    def __init__(self, *, condition_size: int, hidden_size: int, rotary_base: float, precision: Precision) -> None:
        super().__init__()
        device, dtype = torch.cuda.current_device(), precision.params_dtype
        self.rotary_base, self.feature_dtype = rotary_base, precision.rotary_dtype
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, condition_size, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def forward(self, conditions: Tensor, condition_rows: Tensor, positions: Tensor) -> Tensor:
        """Spread every image's condition over its patches.

        conditions: [num_images, condition_size], the LLM's hidden states; condition_rows: [num_tokens], which of them each patch
        is made from; positions: [num_tokens, 2], row and column of each patch.

        Returns [num_tokens, 1, hidden_size], the same on every tensor parallel rank.
        """
        projected = deferrable_linear(conditions.to(self.weight.dtype), self.weight, self.bias)
        features = position_features(positions, hidden_size=projected.shape[-1], base=self.rotary_base, dtype=self.feature_dtype)
        return (projected.index_select(0, condition_rows) + features.to(projected.dtype))[:, None]
