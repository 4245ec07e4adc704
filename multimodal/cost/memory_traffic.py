"""Bytes that a layer's elementwise work moves through memory: norms, residuals, activation functions, rotations, softmax.

Matrix products reuse what they load and are bound by arithmetic; the rest is bound by memory: seconds = bytes / bandwidth.
"""

from multimodal.values.model_graph import LayerKind, Role, Unit

_LOGIT_BYTES = 4
"""Logits are fp32."""


def layer_traffic_bytes(unit: Unit, kind: LayerKind, *, vocab_size: int, bytes_per_element: int) -> float:
    """Return the bytes per counted token of one layer's forward, all tensor parallel ranks together; a backward moves twice that.

    A transformer layer, in elements: two norms read and write h each (4h), two residual sums read two and write one (6h),
    rotary positions read and write queries and keys, the activation function reads its inputs and writes its output.
    The LLM's head writes its logits and reads them twice (maximum, sum of exponentials).
    """
    shape = unit.transformer
    hidden = shape.hidden_size
    if kind is LayerKind.TRANSFORMER:
        rotated = (shape.num_attention_heads + shape.query_groups) * shape.head_channels
        activation = shape.ffn_hidden_size * (3 if shape.activation == "swiglu" else 2)
        return float(bytes_per_element * (10 * hidden + 2 * rotated + activation))
    if kind is LayerKind.HEAD and unit.role is Role.BACKBONE:
        return float(2 * bytes_per_element * hidden + 3 * _LOGIT_BYTES * vocab_size)
    return float(2 * bytes_per_element * hidden)
