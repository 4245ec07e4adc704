"""A transformer layer in seven segments, between which its collectives lie (Optimus, 4.2).

    segment      parts                           collective behind them
    input_norm   norm                            gathered (its gradient: summed)
    qkv          product of q, k and v
    attention    rotation, core attention
    projection   product                         summed
    mlp_norm     residual sum, norm              gathered (its gradient: summed)
    mlp_up       product
    mlp_down     activation, product             summed
                 residual sum, which runs with the next part of its stage

megatron-core's own code computes all of it: the layer's submodules, or a submodule's `forward` without the parts before and after
it. Of layers of Transformer Engine the pieces have the weights: norms, which these fuse with products, and products are torch's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from multimodal.model.adapter import adapter_of, is_engine_linear
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import Exchange, LayerPart, StagePass, State
from multimodal.model.norm import normalised
from multimodal.model.weight_gradient_queue import accumulate_into_buffers

SEGMENT_NAMES = ("input_norm", "qkv", "attention", "projection", "mlp_norm", "mlp_up", "mlp_down")


class _Product(Module):
    """A tensor parallel linear layer without its collectives."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self._held = (linear,)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the product on this rank, and the bias if the caller adds it."""
        (linear,) = self._held
        leaves_bias = linear.te_return_bias if is_engine_linear(linear) else linear.skip_bias_add
        bias, left = (None, bias_of(linear)) if leaves_bias else (bias_of(linear), None)
        return deferrable_linear(rows, linear.weight, bias, adapter_of(linear)), left


class _AsIs(Module):
    """Replaces a linear layer that another part runs."""

    def __init__(self, linear: Any | None = None) -> None:
        super().__init__()
        self._held = (linear,)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows, and the bias of the layer that made them."""
        (linear,) = self._held
        return rows, bias_of(linear) if linear is not None else None


def bias_of(linear: Any) -> Tensor | None:
    """Return the bias of a linear layer; Transformer Engine has an empty one where there is none."""
    return linear.bias if linear.bias is not None and linear.bias.numel() else None


class _Within:
    """A view of a module in which some attributes that its methods use are replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def transformer_segments(layer: Any, frequencies: Callable[[StagePass], Tensor | None]) -> tuple[tuple[LayerPart, ...], ...]:
    """Return the parts of each segment of megatron-core's TransformerLayer; frequencies: its rotary angles."""
    for linear in layer.modules():
        if is_engine_linear(linear) and linear.fuse_wgrad_accumulation and not hasattr(linear.weight, "accumulate_gradient"):
            accumulate_into_buffers([linear.weight], _add_gradient)  # as whole passes do, after which hooks add nothing
    return (
        (LayerPart(_normed(_norm_before(layer, layer.input_layernorm, layer.self_attention.linear_qkv)), Exchange.GATHERED),),
        (LayerPart(_qkv(layer.self_attention)),),
        (LayerPart(_attention(layer.self_attention, frequencies)),),
        (LayerPart(_branch_product(layer.self_attention.linear_proj), Exchange.SUMMED),),
        (LayerPart(_sum_and_norm(layer), Exchange.GATHERED),),
        (LayerPart(_branch_product(layer.mlp.linear_fc1)),),
        (LayerPart(_down(layer.mlp), Exchange.SUMMED), LayerPart(_sum(layer))),
    )


def _add_gradient(rows: Tensor, output_gradient: Tensor, buffer: Tensor) -> None:
    buffer.add_(output_gradient.t().matmul(rows))


def _norm_before(layer: Any, norm: Module, linear: Any) -> Callable[[Tensor], Tensor]:
    """Return the norm before a product, also where Transformer Engine fuses both."""
    if not hasattr(linear, "layer_norm_weight"):
        return norm
    return partial(
        normalised,
        weight=linear.layer_norm_weight,
        bias=linear.layer_norm_bias,
        eps=layer.config.layernorm_epsilon,
        offset=float(layer.config.layernorm_zero_centered_gamma),
    )


def _normed(norm: Callable[[Tensor], Tensor]) -> Any:
    def run(state: State, given: StagePass) -> State:
        (hidden,) = state
        return hidden, norm(hidden)

    return run


def _qkv(attention: Any) -> Any:
    alone = _Within(attention, linear_qkv=_Product(attention.linear_qkv))

    def run(state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, *type(attention).get_query_key_value_tensors(alone, rows)

    return run


def _attention(attention: Any, frequencies: Callable[[StagePass], Tensor | None]) -> Any:
    def run(state: State, given: StagePass) -> State:
        residual, query, key, value = state
        alone = _Within(attention, get_query_key_value_tensors=lambda *_, **__: (query, key, value), linear_proj=_AsIs())
        mixed, _ = type(attention).forward(
            alone, query, attention_mask=None, rotary_pos_emb=frequencies(given), packed_seq_params=given.lengths
        )
        return residual, mixed

    return run


def _branch_product(linear: Module) -> Any:
    product = _Product(linear)

    def run(state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, product(rows)[0]

    return run


def _sum_and_norm(layer: Any) -> Any:
    norm = _norm_before(layer, layer.pre_mlp_layernorm, layer.mlp.linear_fc1)

    def run(state: State, given: StagePass) -> State:
        residual, attended = state
        hidden = _residual_sum(layer, layer.self_attn_bda, attended, bias_of(layer.self_attention.linear_proj), residual)
        return hidden, norm(hidden)

    return run


def _down(mlp: Any) -> Any:
    alone = _Within(mlp, linear_fc1=_AsIs(mlp.linear_fc1), linear_fc2=_Product(mlp.linear_fc2))

    def run(state: State, given: StagePass) -> State:
        residual, inner = state
        return residual, type(mlp).forward(alone, inner)[0]

    return run


def _sum(layer: Any) -> Any:
    def run(state: State, given: StagePass) -> State:
        residual, branch = state
        return (_residual_sum(layer, layer.mlp_bda, branch, bias_of(layer.mlp.linear_fc2), residual),)

    return run


def _residual_sum(layer: Any, bias_dropout_add: Any, branch: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    add = bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)
    return add((branch, bias), residual, layer.hidden_dropout)
