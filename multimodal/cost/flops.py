"""Floating point operations that a model needs for given lengths: the numerator of MFU.

Counted as in Megatron's formula: 2 per multiply-add, causal attention at half its square, no recomputation. A backward costs as
much as the forward for each kind of gradient that is needed (Cornstarch 4.2: a frozen layer behind something trainable computes
input gradients only, a frozen encoder nothing).
"""

from collections.abc import Iterable

from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import LayerKind, ModelGraph, Role, Unit
from multimodal.values.sample_lengths import SampleLengths


def step_flops(graph: ModelGraph, lengths: Iterable[SampleLengths], *, vocab_size: int) -> float:
    """FLOPs of one optimizer step (forward and backward) over these samples; vocab_size: padded."""
    samples = tuple(lengths)
    return sum(_unit_flops(graph, unit, samples, vocab_size=vocab_size) for unit in graph.units)


def _unit_flops(graph: ModelGraph, unit: Unit, samples: tuple[SampleLengths, ...], *, vocab_size: int) -> float:
    if unit.role is Role.BACKBONE:
        sequences = [sample.num_tokens for sample in samples]
        num_outputs = sum(sample.num_target_tokens for sample in samples)
    else:
        items = [item for sample in samples for item in sample.items if item.unit == unit.name]
        sequences, num_outputs = [item.num_tokens for item in items], sum(item.num_output_tokens for item in items)
    total = 0.0
    for index, kind in enumerate(unit.layers):
        need = layers_backward_need(graph, unit.name, range(index, index + 1))
        linear, attention = _layer_forward_flops(graph, unit, kind, sequences, num_outputs, vocab_size=vocab_size)
        total += linear * (1 + _num_linear_backwards(need)) + attention * (3 if need.has_backward else 1)
    return total


def _num_linear_backwards(need: BackwardNeed) -> int:
    return {BackwardNeed.NONE: 0, BackwardNeed.INPUT_GRADIENT: 1, BackwardNeed.WEIGHT_GRADIENT: 1, BackwardNeed.FULL: 2}[need]


def _layer_forward_flops(
    graph: ModelGraph, unit: Unit, kind: LayerKind, sequences: list[int], num_outputs: int, *, vocab_size: int
) -> tuple[float, float]:
    """(FLOPs of matrix products with weights, FLOPs of attention itself)."""
    shape, num_tokens = unit.transformer, sum(sequences)
    if kind is LayerKind.TRANSFORMER:
        query = shape.num_attention_heads * shape.head_channels
        key_value = 2 * shape.query_groups * shape.head_channels
        mlp = shape.ffn_hidden_size * shape.hidden_size * (3 if shape.activation == "swiglu" else 2)
        weights = shape.hidden_size * (query + key_value) + query * shape.hidden_size + mlp
        squares = sum(length * length for length in sequences)
        return 2.0 * num_tokens * weights, 4.0 * query * squares * (0.5 if unit.role is Role.BACKBONE else 1.0)
    if kind is LayerKind.HEAD:
        return 2.0 * num_outputs * shape.hidden_size * vocab_size, 0.0
    if kind is LayerKind.TOKEN_EMBEDDING or unit.image is None:
        return 0.0, 0.0
    if kind is LayerKind.PATCH_EMBEDDING:
        return 2.0 * num_tokens * unit.image.in_channels * unit.image.patch_size**2 * shape.hidden_size, 0.0
    merged = shape.hidden_size * unit.image.merge_size**2
    hidden = unit.projector_hidden_size or merged
    output_size = graph.unit(graph.downstream(unit.name)[0]).transformer.hidden_size
    return 2.0 * num_outputs * hidden * (merged + output_size), 0.0
