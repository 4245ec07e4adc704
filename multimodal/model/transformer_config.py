"""Translates a unit's architecture into the TransformerConfig of megatron-core's layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from multimodal.attention.attention_backend import AUTO
from multimodal.attention.bitfield import MaskMode
from multimodal.cost.engine_limits import fp8_multiple
from multimodal.values.model_graph import Unit


def gelu_tanh(values: Tensor) -> Tensor:
    """GELU approximated by tanh."""
    return torch.nn.functional.gelu(values, approximate="tanh")


def quick_gelu(values: Tensor) -> Tensor:
    """GELU approximated by a sigmoid, as in CLIP."""
    return values * torch.sigmoid(1.702 * values)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": torch.nn.functional.silu,
    "geglu_tanh": gelu_tanh,
    "quick_geglu": quick_gelu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
}
"""Activation functions of the MLP by name; in those with a gate the function is applied to the gate."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of all modules beyond their architecture and process groups."""

    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    transformer_impl: str = "local"
    """`local` (megatron-core's torch layers) or `transformer_engine`."""
    fuses_kernels: bool = False
    """SwiGLU, approximated GELU with its bias, sums of branch, bias and residual, and rotation each as one kernel, if the
    implementation has such kernels."""
    accumulates_in_products: bool = False
    """Products add their weight gradients to float32 buffers themselves."""
    delays_weight_gradients: bool = False
    """Layers of Transformer Engine compute weight gradients on request, as split backwards need."""
    fp8_format: str | None = None
    """`e4m3` or `hybrid`: products of Transformer Engine in FP8."""
    fp8_recipe: str = "tensorwise"
    """Recipe of the scaling factors of FP8 products: `tensorwise`, `delayed`, `mxfp8` or `blockwise`."""
    recompute: str | None = None
    """None, `selective` (core attention) or `full` (whole layers)."""
    attention_backend: str = AUTO
    """Implementation of attention; see `attention_backend.py`."""
    num_multiprocessors: int = 0
    """Multiprocessors of this process's CUDA device; 0: it computes on a CPU."""
    attention_mask: MaskMode = MaskMode.CAUSAL
    """The rule by which the LLM's tokens attend to encoders' items."""
    num_overlapped_parts: int = 1
    """Parts of a transformer layer's tensor parallel collectives, each beside the product of another part; 1: not cut."""
    buffer_rows: int | None = None
    """Rows of the user buffers in which the LLM's layers of Transformer Engine make theirs; None: there are none."""

    @property
    def rotary_dtype(self) -> torch.dtype:
        """Rotary angles are computed in float32, or in float64 for exact checks."""
        return torch.float64 if self.params_dtype == torch.float64 else torch.float32

    @property
    def row_multiple(self) -> int:
        """The number of rows of a product is a multiple of this."""
        return fp8_multiple(self.used_fp8_recipe)

    @property
    def used_fp8_recipe(self) -> str | None:
        """`fp8_recipe`, or None if no product is in FP8."""
        return None if self.fp8_format is None else self.fp8_recipe


def build_transformer_config(unit: Unit, *, tensor_parallel_size: int, options: BuildOptions) -> TransformerConfig:
    """Translate; parameters stay uninitialised (`initialization.py`), and pipeline size is 1, as the plan numbers layers."""
    shape = unit.transformer
    dtype = options.params_dtype
    # megatron-core's one kernel for bias and `F.gelu` computes the approximation by tanh, to float32's precision
    is_approximated = shape.activation == "geglu_tanh" or (shape.activation == "gelu_tanh" and shape.add_bias_linear)
    fuses_gelu = options.fuses_kernels and is_approximated and dtype != torch.float64 and shape.experts is None
    return TransformerConfig(
        num_layers=max(1, shape.num_layers),  # megatron-core divides by it
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_channels,
        normalization=shape.normalization,
        layernorm_epsilon=shape.layernorm_epsilon,
        layernorm_zero_centered_gamma=shape.layernorm_zero_centered_gamma,
        softmax_scale=shape.softmax_scale,
        gated_linear_unit=shape.is_gated,
        activation_func=torch.nn.functional.gelu if fuses_gelu else ACTIVATIONS[shape.activation],
        add_bias_linear=shape.add_bias_linear,
        add_qkv_bias=shape.add_qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel_size,
        sequence_parallel=options.sequence_parallel and tensor_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=options.fuses_kernels and (shape.biases["linear_proj"] or shape.biases["linear_fc2"]),
        bias_activation_fusion=fuses_gelu or (options.fuses_kernels and shape.activation == "swiglu"),
        apply_rope_fusion=options.fuses_kernels and shape.has_rotary_positions and fused_apply_rotary_pos_emb is not None,
        fp8=options.fp8_format,
        fp8_recipe=options.fp8_recipe,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        transformer_impl=options.transformer_impl,
    )
