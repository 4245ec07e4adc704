"""A transformer layer in seven segments, between which its collectives lie (Optimus, 4.2).

    segment      parts                           collective behind them
    input_norm   norm                            gather (of its gradient: sum)
    qkv          product of q, k and v
    attention    rotation, core attention
    projection   product                         sum
    mlp_norm     residual sum, norm              gather (of its gradient: sum)
    mlp_up       product
    mlp_down     activation, product             sum
                 residual sum, which runs with the next part of its stage

megatron-core's own code computes all of it: the layer's submodules, or a submodule's `forward` without the parts before and after
it. Of layers of Transformer Engine the pieces have the weights: norms, which these fuse with products, and products are torch's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from multimodal.cost.layers.layer import GATHER, SUM
from multimodal.model.adapter import adapter_of, is_engine_linear
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import LayerPart, Segments, StagePass, State
from multimodal.model.norm import normalised
from multimodal.model.weight_gradient_queue import accumulate_into_buffers


class _AsIs(Module):
    """Replaces a linear layer that another part runs."""

    def __init__(self, linear: Any = None) -> None:
        super().__init__()
        self._held = (linear,)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows, and the bias of the layer that made them."""
        (linear,) = self._held
        return rows, bias_of(linear) if linear is not None else None


class _Product(_AsIs):
    """A tensor parallel linear layer without its collectives."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the product on this rank, and the bias if the caller adds it."""
        (linear,) = self._held
        leaves_bias = linear.te_return_bias if is_engine_linear(linear) else linear.skip_bias_add
        bias, left = (None, bias_of(linear)) if leaves_bias else (bias_of(linear), None)
        return deferrable_linear(rows, linear.weight, bias, adapter_of(linear)), left


def bias_of(linear: Any) -> Tensor | None:
    """Return the bias of a linear layer; Transformer Engine has an empty one where there is none."""
    return linear.bias if linear.bias is not None and linear.bias.numel() else None


class _Within:
    """A view of a module in which some attributes that its methods use are replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def transformer_segments(layer: Any, frequencies: Callable[[StagePass], Tensor | None]) -> Segments:
    """Return the parts of each segment of megatron-core's TransformerLayer; frequencies: its rotary angles."""
    for linear in layer.modules():
        if is_engine_linear(linear) and linear.fuse_wgrad_accumulation and not hasattr(linear.weight, "accumulate_gradient"):
            # as whole passes do, after which hooks add nothing
            accumulate_into_buffers([linear.weight], lambda rows, gradient, buffer: buffer.add_(gradient.t().matmul(rows)))
    parts = _Parts(layer, frequencies)
    return (
        (LayerPart(parts.norm, GATHER),),
        (LayerPart(parts.qkv),),
        (LayerPart(parts.attention),),
        (LayerPart(parts.projection, SUM),),
        (LayerPart(parts.sum_and_norm, GATHER),),
        (LayerPart(parts.up),),
        (LayerPart(parts.down, SUM), LayerPart(parts.sum)),
    )


def _norm_before(layer: Any, norm: Module, linear: Any) -> Callable[[Tensor], Tensor]:
    """Return the norm before a product, also where Transformer Engine fuses both."""
    if not hasattr(linear, "layer_norm_weight"):
        return norm
    epsilon, offset = layer.config.layernorm_epsilon, float(layer.config.layernorm_zero_centered_gamma)
    return partial(normalised, weight=linear.layer_norm_weight, bias=linear.layer_norm_bias, eps=epsilon, offset=offset)


class _Parts:
    """The parts of a layer; each takes the state before it, and returns the one behind it."""

    def __init__(self, layer: Any, frequencies: Callable[[StagePass], Tensor | None]) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._layer, self._attention, self._mlp, self._frequencies = layer, attention, mlp, frequencies
        self._norm = _norm_before(layer, layer.input_layernorm, attention.linear_qkv)
        self._mlp_norm = _norm_before(layer, layer.pre_mlp_layernorm, mlp.linear_fc1)
        self._projection, self._up = _Product(attention.linear_proj), _Product(mlp.linear_fc1)
        self._qkv = _Within(attention, linear_qkv=_Product(attention.linear_qkv))
        self._down = _Within(mlp, linear_fc1=_AsIs(mlp.linear_fc1), linear_fc2=_Product(mlp.linear_fc2))

    def norm(self, state: State, given: StagePass) -> State:
        (hidden,) = state
        return hidden, self._norm(hidden)

    def qkv(self, state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, *type(self._attention).get_query_key_value_tensors(self._qkv, rows)

    def attention(self, state: State, given: StagePass) -> State:
        residual, query, key, value = state
        alone = _Within(self._attention, get_query_key_value_tensors=lambda *_, **__: (query, key, value), linear_proj=_AsIs())
        mixed, _ = type(self._attention).forward(
            alone, query, attention_mask=None, rotary_pos_emb=self._frequencies(given), packed_seq_params=given.lengths
        )
        return residual, mixed

    def projection(self, state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, self._projection(rows)[0]

    def sum_and_norm(self, state: State, given: StagePass) -> State:
        residual, attended = state
        bias = bias_of(self._attention.linear_proj)
        hidden = _residual_sum(self._layer, self._layer.self_attn_bda, attended, bias, residual)
        return hidden, self._mlp_norm(hidden)

    def up(self, state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, self._up(rows)[0]

    def down(self, state: State, given: StagePass) -> State:
        residual, inner = state
        return residual, type(self._mlp).forward(self._down, inner)[0]

    def sum(self, state: State, given: StagePass) -> State:
        residual, branch = state
        return (_residual_sum(self._layer, self._layer.mlp_bda, branch, bias_of(self._mlp.linear_fc2), residual),)


def _residual_sum(layer: Any, bias_dropout_add: Any, branch: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    add = bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)
    return add((branch, bias), residual, layer.hidden_dropout)
