"""Bytes that layers keep: activations from forward to backward, and weights, gradients and optimizer state.

Activations as in Korthikanti et al. (2022), section 4, with flash attention (nothing grows with the square of the length)
without dropout, and with sequence parallelism, which divides everything by the tensor parallel size. All in bf16 but logits.
"""

from multimodal.cost.layer_flops import UnitLoad
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import LayerKind, Role, Unit

BYTES_PER_ELEMENT = 2
"""bf16 activations and weights."""
GRADIENT_BYTES = 4
"""Megatron accumulates gradients in fp32."""
OPTIMIZER_BYTES = 12
"""Adam in fp32: master weight and two moments, divided over replicas (ZeRO-1)."""


def layer_activation_bytes(unit: Unit, kind: LayerKind, load: UnitLoad, *, need: BackwardNeed, vocab_size: int) -> float:
    """Return the bytes that a layer keeps for its backward, all tensor parallel ranks together; 0 where it has no backward.

    A transformer layer keeps per token, in elements: the inputs of both norms (2h), queries, keys, values and the attention's
    output, and the MLP's first product; if its weights are trained, also the inputs of its matrix products (2h and the MLP's
    inner width). For GPT's shape that is 32h bytes, Korthikanti's 34h less its two dropout masks. The LLM's head keeps the fp32
    logits of the target tokens; other layers their input.
    """
    if not need.has_backward:
        return 0.0
    shape = unit.transformer
    hidden = shape.hidden_size
    if kind is LayerKind.TRANSFORMER:
        query = shape.num_attention_heads * shape.head_channels
        key_value = 2 * shape.query_groups * shape.head_channels
        first_product = shape.ffn_hidden_size * (2 if shape.activation == "swiglu" else 1)
        elements = 2 * hidden + 2 * query + key_value + first_product
        if need.trains_weights:
            elements += 2 * hidden + shape.ffn_hidden_size
        return float(BYTES_PER_ELEMENT * load.num_tokens * elements)
    if kind is LayerKind.HEAD and unit.role is Role.BACKBONE:
        return float(load.num_outputs * (BYTES_PER_ELEMENT * hidden + 4 * vocab_size))
    if kind is LayerKind.TOKEN_EMBEDDING:
        return 0.0
    return float(BYTES_PER_ELEMENT * load.num_tokens * hidden)


def layer_static_bytes(num_weights: int, *, is_trained: bool, data_parallel_size: int) -> float:
    """Return the bytes that a layer's weights take all the time, all tensor parallel ranks together."""
    trained = GRADIENT_BYTES + OPTIMIZER_BYTES / data_parallel_size
    return num_weights * (BYTES_PER_ELEMENT + (trained if is_trained else 0.0))
