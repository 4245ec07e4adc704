"""Adds a branch to the residual stream, scaled channel by channel (layer scale: CaiT, InternViT)."""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

INITIAL_SCALE = 0.1
_Branch = tuple[Tensor, Tensor | None]
"""A branch's output and the bias that is still to be added to it."""


class ScaledAdd(torch.nn.Module):
    """Stands in for megatron-core's bias, dropout and addition of a layer without dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.scale = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype, device=device))
        self.scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, is_training: bool, is_fused: bool) -> Callable[[_Branch, Tensor, float], Tensor]:
        """Return the function that adds."""
        return self._add

    def _add(self, branch: _Branch, residual: Tensor, dropout: float) -> Tensor:
        output, bias = branch
        return residual + self.scale * (output if bias is None else output + bias)
