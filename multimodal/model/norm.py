"""LayerNorm and RMSNorm that allow sequence parallelism and float64 (megatron-core's torch norm refuses the first)."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Norm(torch.nn.Module):
    """Normalises the last dimension, in at least float32, by the config's norm; to a zero-centered weight one is added.

    Under sequence parallelism each tensor parallel rank has its share of the tokens, so the parameters are marked
    `sequence_parallel` and their gradients are summed over the tensor parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.eps, self.offset = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden_size]; returns the same shape and dtype."""
        return normalised(hidden, self.weight, self.bias, eps=self.eps, offset=self.offset)


def normalised(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, offset: float) -> Tensor:
    """Normalise by LayerNorm if there is a bias, else by RMSNorm; offset: is added to the weight."""
    # Torch's kernels on CUDA read half precision and compute in float32; a copy in float32 would be written and read again.
    keeps_dtype = hidden.dtype == torch.float64 or (hidden.is_cuda and hidden.dtype == weight.dtype)
    wide = hidden if keeps_dtype else hidden.float()
    scale, shape = weight.to(wide.dtype), (hidden.shape[-1],)
    scale = scale + offset if offset else scale
    if bias is None:
        normal = torch.nn.functional.rms_norm(wide, shape, scale, eps)
    else:
        normal = torch.nn.functional.layer_norm(wide, shape, scale, bias.to(wide.dtype), eps)
    return normal.to(hidden.dtype)


class AllHeadsNorm(Norm):
    """Normalises the channels of all heads together; one rank has them all."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size * config.num_attention_heads, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., heads, channels]; returns the same shape and dtype."""
        return super().forward(hidden.flatten(-2)).view_as(hidden)
