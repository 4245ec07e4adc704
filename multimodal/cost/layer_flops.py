"""Floating point operations and weights of one layer, by its kind.

Counted as in Megatron's formula: 2 per multiply-add, causal attention at half its square, no recomputation; norms, biases and
other elementwise work are left out.
"""

from collections.abc import Iterable
from typing import NamedTuple

from multimodal.values.model_graph import LayerKind, ModelGraph, Role, Unit
from multimodal.values.sample_lengths import SampleLengths


class UnitLoad(NamedTuple):
    """What a unit processes at once, as far as its cost depends on it; adds up over atoms."""

    num_tokens: int = 0
    """Tokens inside the unit's transformer."""
    num_squared: int = 0
    """Sum of squares of the lengths of its sequences."""
    num_outputs: int = 0
    """Tokens that leave: of the projector for an encoder, target tokens for the LLM, all tokens for a generator."""
    num_sequences: int = 0
    """Sequences that attend apart: samples, or items of an encoder or a generator. No FLOPs, but some calls for each."""


class LayerFlops(NamedTuple):
    """Forward FLOPs of a layer; a backward costs as much per kind of gradient for weights, and twice as much for attention."""

    linear: float
    """Matrix products with weights."""
    attention: float
    """Attention itself: products of activations with activations."""


def item_load(num_tokens: int, num_output_tokens: int) -> UnitLoad:
    """Return the load of one sequence inside a unit."""
    return UnitLoad(num_tokens, num_tokens * num_tokens, num_output_tokens, 1 if num_tokens else 0)


def sample_load(unit: Unit, sample: SampleLengths) -> UnitLoad:
    """Return what one sample with all its items asks of a unit."""
    if unit.role is Role.BACKBONE:
        return item_load(sample.num_tokens, sample.num_target_tokens)
    items = (item for item in sample.items if item.unit == unit.name)
    is_generator = unit.role is Role.GENERATOR
    return add_loads(item_load(item.num_tokens, item.num_tokens if is_generator else item.num_output_tokens) for item in items)


def add_loads(loads: Iterable[UnitLoad]) -> UnitLoad:
    """Sum up; nothing is the empty load."""
    columns = zip(*loads, strict=True)
    return UnitLoad(*map(sum, columns))


def layer_weights(graph: ModelGraph, unit: Unit, kind: LayerKind, *, vocab_size: int) -> int:
    """Weights of one layer's matrices, all tensor parallel ranks together; vocab_size: padded.

    A generator's head maps a hidden state to the pixels of its patch, or, where no image is described, to its own width.
    """
    shape = unit.transformer
    if kind is LayerKind.TRANSFORMER:
        query = shape.num_attention_heads * shape.head_channels
        key_value = 2 * shape.query_groups * shape.head_channels
        mlp = shape.ffn_hidden_size * shape.hidden_size * (3 if shape.activation == "swiglu" else 2)
        return shape.hidden_size * (query + key_value) + query * shape.hidden_size + mlp
    if kind is LayerKind.HEAD:
        return shape.hidden_size * (_made_values(unit) if unit.role is Role.GENERATOR else vocab_size)
    if kind is LayerKind.TOKEN_EMBEDDING:
        return shape.hidden_size * vocab_size
    if unit.role is Role.GENERATOR:
        return graph.unit(graph.upstream(unit.name)[0]).transformer.hidden_size * shape.hidden_size
    if kind is LayerKind.PATCH_EMBEDDING:
        return _embedding_weights(unit)
    if unit.image is None and unit.audio is None:
        return 0
    merged = shape.hidden_size * unit.merge_factor
    output_size = graph.unit(graph.downstream(unit.name)[0]).transformer.hidden_size
    return (unit.projector_hidden_size or merged) * (merged + output_size)


def _made_values(unit: Unit) -> int:
    """Values that a generator makes of one token."""
    return unit.image.in_channels * unit.image.patch_size**2 if unit.image is not None else unit.transformer.hidden_size


def _embedding_weights(unit: Unit) -> int:
    hidden = unit.transformer.hidden_size
    if unit.audio is not None:
        return 3 * hidden * (unit.audio.num_mel_bins + hidden)
    return unit.image.in_channels * unit.image.patch_size**2 * hidden if unit.image is not None else 0


def num_products(kind: LayerKind) -> int:
    """Return how many matrix products with weights a layer's forward consists of."""
    return {LayerKind.TRANSFORMER: 4, LayerKind.PROJECTOR: 2, LayerKind.TOKEN_EMBEDDING: 0}.get(kind, 1)


def layer_forward_flops(graph: ModelGraph, unit: Unit, kind: LayerKind, load: UnitLoad, *, vocab_size: int) -> LayerFlops:
    """FLOPs of one layer's forward over a load, all tensor parallel ranks together.

    Looking an embedding up costs nothing; nor does a generator's projector, which maps one row for each image.
    """
    if kind is LayerKind.TOKEN_EMBEDDING or (kind is LayerKind.PROJECTOR and unit.role is Role.GENERATOR):
        return LayerFlops(0.0, 0.0)
    weights = layer_weights(graph, unit, kind, vocab_size=vocab_size)
    if kind is LayerKind.TRANSFORMER:
        query = unit.transformer.num_attention_heads * unit.transformer.head_channels
        masked = 0.5 if unit.role is Role.BACKBONE else 1.0
        return LayerFlops(2.0 * load.num_tokens * weights, 4.0 * query * load.num_squared * masked)
    if kind is LayerKind.PATCH_EMBEDDING and unit.audio is not None:
        weights += 3 * unit.transformer.hidden_size * unit.audio.num_mel_bins  # the first convolution sees two frames per token
    at_exit = kind in (LayerKind.HEAD, LayerKind.PROJECTOR)
    return LayerFlops(2.0 * (load.num_outputs if at_exit else load.num_tokens) * weights, 0.0)
