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
it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from multimodal.model.adapter import adapter_of
from multimodal.model.deferrable_linear import deferrable_linear
from multimodal.model.layers.layer_kind import Exchange, LayerPart, StagePass, State

SEGMENT_NAMES = ("input_norm", "qkv", "attention", "projection", "mlp_norm", "mlp_up", "mlp_down")


class _Product(Module):
    """A tensor parallel linear layer without its collectives."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self._held = (linear,)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the product on this rank, and the bias if the caller adds it."""
        (linear,) = self._held
        if linear.skip_bias_add:
            return deferrable_linear(rows, linear.weight, None, adapter_of(linear)), linear.bias
        return deferrable_linear(rows, linear.weight, linear.bias, adapter_of(linear)), None


class _AsIs(Module):
    """Replaces a linear layer that another part runs."""

    def __init__(self, linear: Any | None = None) -> None:
        super().__init__()
        self._held = (linear,)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows, and the bias of the layer that made them."""
        (linear,) = self._held
        return rows, linear.bias if linear is not None else None


class _Within:
    """A view of a module in which some attributes that its methods use are replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def transformer_segments(layer: Any, frequencies: Callable[[StagePass], Tensor | None]) -> tuple[tuple[LayerPart, ...], ...]:
    """Return the parts of each segment of megatron-core's TransformerLayer; frequencies: its rotary angles."""
    return (
        (LayerPart(_normed(layer.input_layernorm), Exchange.GATHERED),),
        (LayerPart(_qkv(layer.self_attention)),),
        (LayerPart(_attention(layer.self_attention, frequencies)),),
        (LayerPart(_projection(layer.self_attention.linear_proj), Exchange.SUMMED),),
        (LayerPart(_sum_and_norm(layer), Exchange.GATHERED),),
        (LayerPart(_up(layer.mlp.linear_fc1)),),
        (LayerPart(_down(layer.mlp), Exchange.SUMMED), LayerPart(_sum(layer))),
    )


def _normed(norm: Module) -> Any:
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


def _projection(linear: Module) -> Any:
    product = _Product(linear)

    def run(state: State, given: StagePass) -> State:
        residual, mixed = state
        return residual, product(mixed)[0]

    return run


def _sum_and_norm(layer: Any) -> Any:
    def run(state: State, given: StagePass) -> State:
        residual, attended = state
        hidden = _residual_sum(layer, layer.self_attn_bda, attended, layer.self_attention.linear_proj.bias, residual)
        return hidden, layer.pre_mlp_layernorm(hidden)

    return run


def _up(linear: Module) -> Any:
    product = _Product(linear)

    def run(state: State, given: StagePass) -> State:
        residual, rows = state
        return residual, product(rows)[0]

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
        return (_residual_sum(layer, layer.mlp_bda, branch, layer.mlp.linear_fc2.bias, residual),)

    return run


def _residual_sum(layer: Any, bias_dropout_add: Any, branch: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    add = bias_dropout_add(layer.training, layer.config.bias_dropout_fusion)
    summed: Tensor = add((branch, bias), residual, layer.hidden_dropout)
    return summed
