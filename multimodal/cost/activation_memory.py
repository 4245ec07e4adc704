"""Bytes that layers keep from their forward to the end of their backward.

Two implementations are told apart, as runs choose them (--transformer-impl):

- `transformer_engine`, fused kernels: Korthikanti et al. (2022), section 4, with flash attention (nothing grows with the square
  of the length) and without dropout.
- `local`, megatron-core's torch layers with our norms and attention: what autograd saves there, tensor by tensor; checked
  against real stages.

Under sequence parallelism tensor parallel size divides everything; without it the inputs of norms and matrix products are whole
on every rank.
"""

from typing import Literal, NamedTuple

from multimodal.cost.layer_costs import Recompute
from multimodal.cost.layer_flops import UnitLoad
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import LayerKind, Role, Transformer, Unit

Implementation = Literal["local", "transformer_engine"]
_WIDE_BYTES = 4
"""Norms, logits and statistics are fp32 where layers compute in bf16."""
_INDEX_BYTES = 8


class Kept(NamedTuple):
    """Bytes of one layer over a load, as on one rank that has it alone."""

    whole: float
    """What only sequence parallelism divides."""
    split: float
    """What tensor parallelism divides: heads, inner widths, the vocabulary."""
    replicated: float = 0.0
    """What every tensor parallel rank keeps."""

    def all_ranks(self, *, tensor_parallel_size: int, sequence_parallel: bool) -> float:
        """Bytes of all tensor parallel ranks together."""
        copies = 1 if sequence_parallel else tensor_parallel_size
        return copies * self.whole + self.split + tensor_parallel_size * self.replicated


def layer_activation_bytes(
    unit: Unit,
    kind: LayerKind,
    load: UnitLoad,
    *,
    need: BackwardNeed,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = True,
    bytes_per_element: int = 2,
    implementation: Implementation = "transformer_engine",
    recompute: Recompute | None = None,
    is_spread: bool = False,
) -> float:
    """Return the bytes that a layer keeps for its backward, all tensor parallel ranks together; 0 where it has no backward.

    load: of one microbatch, divided by the context parallel size; vocab_size: padded; bytes_per_element: of activations;
    is_spread: whether context parallel ranks share the tokens.
    """
    if not need.has_backward:
        return 0.0
    kept = kept_bytes(
        unit,
        kind,
        load,
        need=need,
        vocab_size=vocab_size,
        bytes_per_element=bytes_per_element,
        implementation=implementation,
        recompute=recompute,
        is_spread=is_spread,
    )
    return kept.all_ranks(tensor_parallel_size=tensor_parallel_size, sequence_parallel=sequence_parallel)


def kept_bytes(
    unit: Unit,
    kind: LayerKind,
    load: UnitLoad,
    *,
    need: BackwardNeed,
    vocab_size: int,
    bytes_per_element: int,
    implementation: Implementation,
    recompute: Recompute | None,
    is_spread: bool = False,
) -> Kept:
    """Count one layer with a backward; where its own weights have gradients, their inputs are kept, too.

    is_spread: attention that gathers keys and values keeps its inputs and repeats itself in the backward, as `selective` does.
    """
    shape, size, trains = unit.transformer, bytes_per_element, need.trains_weights
    if kind is LayerKind.TRANSFORMER:
        if recompute == "full":
            return Kept(float(size * load.num_tokens * shape.hidden_size), 0.0)
        is_selective = is_spread or recompute == "selective"
        per_token = _local_layer if implementation == "local" else _fused_layer
        whole, split = per_token(shape, trains=trains, size=size, is_selective=is_selective)
        return Kept(load.num_tokens * whole, load.num_tokens * split)
    if kind is LayerKind.TOKEN_EMBEDDING or (kind is LayerKind.PROJECTOR and unit.role is Role.GENERATOR):
        return Kept(0.0, 0.0)  # token ids, or which image a patch is of: a few bytes
    if kind is LayerKind.PATCH_EMBEDDING:
        return Kept(0.0, 0.0, float(size * load.num_tokens * _values_per_token(unit) if trains else 0))
    is_local = implementation == "local"
    norm = _norm_bytes(shape, trains=trains, size=size, is_passed=need.sends_gradient) if is_local else size * shape.hidden_size
    if kind is LayerKind.PROJECTOR:
        return _projector(unit, load, norm=norm, trains=trains, size=size)
    if unit.role is Role.GENERATOR:
        made = max(size, _WIDE_BYTES) * _values_per_token(unit)
        return Kept(load.num_tokens * norm, 0.0, load.num_tokens * (made + (size * shape.hidden_size if trains else 0.0)))
    logits = max(size, _WIDE_BYTES) * vocab_size
    rows = (size * shape.hidden_size if trains else 0.0) + 2 * _INDEX_BYTES
    return Kept(load.num_tokens * norm, float(load.num_outputs * logits), load.num_outputs * rows)


def _fused_layer(shape: Transformer, *, trains: bool, size: int, is_selective: bool) -> tuple[float, float]:
    """What fused kernels keep: (whole, split) bytes per token.

    Inputs of both norms (2h), queries, keys, values and the attention's output, and the MLP's first product; if weights are
    trained, also the inputs of the matrix products (2h and the MLP's inner width). For GPT's shape that is 32h bytes in bf16,
    Korthikanti's 34h less its two dropout masks.
    """
    query, key_value = _widths(shape)
    first_product = shape.ffn_hidden_size * (2 if shape.activation == "swiglu" else 1)
    output = 0 if is_selective and not trains else query
    whole = 2 * shape.hidden_size * (2 if trains else 1)
    split = query + key_value + output + first_product + (shape.ffn_hidden_size if trains else 0)
    return float(size * whole), float(size * split)


def _local_layer(shape: Transformer, *, trains: bool, size: int, is_selective: bool) -> tuple[float, float]:
    """What torch's autograd saves: (whole, split) bytes per token.

    Rotated queries and keys and the cosines and sines of both; keys and values repeated to as many heads as queries have (without
    repetition the values are a view that keeps the whole qkv product); the attention's output, once as its kernel made it and
    once as the projection's input; a SwiGLU's product, both of its factors and their product; norms as `_norm_bytes`.
    """
    query, key_value = _widths(shape)
    qkv = query + key_value
    whole = 2 * _norm_bytes(shape, trains=trains, size=size) + (2 * size * shape.hidden_size if trains else 0.0)
    whole += 4 * size * shape.head_channels
    is_repeated = shape.query_groups < shape.num_attention_heads
    if is_selective:
        attention = float(size * (query + key_value / 2 + qkv))
    else:
        attention = size * (3 * query + (query if is_repeated else qkv)) + _WIDE_BYTES * shape.num_attention_heads
    inner = shape.ffn_hidden_size * (4 if shape.activation == "swiglu" else 1)
    inputs = query + shape.ffn_hidden_size if trains else 0
    return whole, attention + size * (inner + inputs)


def _norm_bytes(shape: Transformer, *, trains: bool, size: int, is_passed: bool = True) -> float:
    """A norm keeps its input, at least in fp32, and its statistics; RMSNorm with a trained weight also the normalised input.

    is_passed: whether a gradient of the input is needed; if not, RMSNorm keeps the normalised input alone.
    """
    wide = max(size, _WIDE_BYTES)
    if shape.normalization == "LayerNorm":
        return float(wide * (shape.hidden_size + 2))
    return float(wide * (shape.hidden_size * (is_passed + trains) + 1))


def _projector(unit: Unit, load: UnitLoad, *, norm: float, trains: bool, size: int) -> Kept:
    """Norm and both products; tokens are gathered before the first, so nothing but the inner width is divided."""
    hidden = unit.transformer.hidden_size
    inner = (unit.projector_hidden_size or hidden * unit.merge_factor) * (2 if trains else 1)
    whole = load.num_tokens * (norm + (size * hidden if trains else 0.0))
    return Kept(0.0, float(size * load.num_outputs * inner), whole)


def _values_per_token(unit: Unit) -> int:
    """Numbers that a token is made from, or that are made of it."""
    if unit.image is not None:
        return unit.image.in_channels * unit.image.patch_size**2
    return 2 * unit.audio.num_mel_bins if unit.audio is not None else unit.transformer.hidden_size


def _widths(shape: Transformer) -> tuple[int, int]:
    """Widths of queries, and of keys and values together."""
    return shape.num_attention_heads * shape.head_channels, 2 * shape.query_groups * shape.head_channels
