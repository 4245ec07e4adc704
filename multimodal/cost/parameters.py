"""How many parameters a model has, exactly: matrices, embeddings, norms and biases, as multimodal/model builds them."""

from multimodal.cost.layer_flops import layer_weights
from multimodal.values.model_graph import LayerKind, ModelGraph, Role, Unit


def parameter_count(graph: ModelGraph, *, vocab_size: int | None = None) -> int:
    """Parameters of all units; vocab_size: padded, None: what the model file says (0 where it says nothing)."""
    return sum(unit_parameters(graph, unit, vocab_size=vocab_size) for unit in graph.units)


def unit_parameters(graph: ModelGraph, unit: Unit, *, vocab_size: int | None = None) -> int:
    """Parameters of one unit, projector included; tied word embeddings count once."""
    size = vocab_size if vocab_size is not None else unit.vocab_size or 0
    is_tied = unit.role is Role.BACKBONE and not unit.untie_embeddings_and_output_weights
    total = sum(layer_parameters(graph, unit, kind, vocab_size=size) for kind in unit.layers)
    return total - (layer_weights(graph, unit, LayerKind.HEAD, vocab_size=size) if is_tied else 0)


def layer_parameters(graph: ModelGraph, unit: Unit, kind: LayerKind, *, vocab_size: int) -> int:
    """Parameters of one layer, all tensor parallel ranks together."""
    return layer_weights(graph, unit, kind, vocab_size=vocab_size) + _vectors(graph, unit, kind)


def _vectors(graph: ModelGraph, unit: Unit, kind: LayerKind) -> int:
    """Entries of norms and biases."""
    shape = unit.transformer
    norm = shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)
    if kind is LayerKind.TRANSFORMER:
        qkv = (shape.num_attention_heads + 2 * shape.query_groups) * shape.head_channels
        inner = shape.ffn_hidden_size * (2 if shape.activation == "swiglu" else 1)
        qkv_bias = qkv if shape.add_qkv_bias or shape.add_bias_linear else 0
        return 2 * norm + qkv_bias + (2 * shape.hidden_size + inner if shape.add_bias_linear else 0)
    if kind is LayerKind.HEAD:
        return norm + (unit.image.in_channels * unit.image.patch_size**2 if unit.image is not None else 0)
    if kind is LayerKind.PATCH_EMBEDDING:
        return shape.hidden_size * (2 if unit.audio is not None else 1)
    if kind is LayerKind.TOKEN_EMBEDDING:
        return 0
    if unit.role is Role.GENERATOR:
        return shape.hidden_size
    output_size = graph.unit(graph.downstream(unit.name)[0]).transformer.hidden_size
    return norm + (unit.projector_hidden_size or shape.hidden_size * unit.merge_factor) + output_size
