"""Where a patch is to be, as fixed features: what a generator's tokens start from, beside what the LLM says of their image."""

import torch
from torch import Tensor


def position_features(positions: Tensor, *, hidden_size: int, base: float, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of row and column at geometric frequencies, as diffusion transformers use them (DiT, section 3).

    positions: [num_tokens, 2], integers; base: ratio of the highest to the lowest frequency.
    Returns [num_tokens, hidden_size] in `dtype`: a quarter each for sines and cosines of rows and columns, zeros for the rest.
    """
    num_frequencies = hidden_size // 4
    exponent = torch.arange(num_frequencies, device=positions.device, dtype=dtype) / max(1, num_frequencies)
    angles = positions.to(dtype)[:, :, None] / base**exponent  # [num_tokens, 2, num_frequencies]
    features = torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(1)
    return torch.nn.functional.pad(features, (0, hidden_size - features.shape[1]))
