"""Bytes that a layer's elementwise work moves through memory: norms, residuals, activation functions, rotations, softmax.

Matrix products reuse what they load and are bound by arithmetic; the rest is bound by memory: seconds = bytes / bandwidth.
"""

from typing import NamedTuple

from multimodal.values.model_graph import LayerKind, Role, Unit

_LOGIT_BYTES = 4
"""Logits are fp32."""


class LayerTraffic(NamedTuple):
    """Bytes per counted token of one layer, all tensor parallel ranks together."""

    forward: float
    input_gradient: float
    """All of the backward: weight gradients are matrix products, which read what they need themselves."""


def layer_traffic_bytes(unit: Unit, kind: LayerKind, *, vocab_size: int, bytes_per_element: int) -> LayerTraffic:
    """Count reads and writes of one layer, operation by operation, as if each were one kernel.

    In elements per token, h the hidden size, f the inner one, r queries and keys together:

    | of a transformer layer | forward | backward |
    |---|---|---|
    | two norms | read and write: 4h | read the gradient and the input, write: 6h |
    | two residual sums | read two, write one: 6h | the branch's gradient is added to the stream's: 6h |
    | rotary positions | read and write: 2r | the same |
    | GELU | read and write: 2f | read the gradient and the input, write: 3f |
    | or SwiGLU | read two, write one: 3f | read the gradient and two inputs, write two: 5f |

    The LLM's head writes its logits and reads them twice (maximum, sum of exponentials); its backward reads them and writes
    their gradient.
    """
    shape, hidden = unit.transformer, unit.transformer.hidden_size
    if kind is LayerKind.TRANSFORMER:
        rotated = 2 * (shape.num_attention_heads + shape.query_groups) * shape.head_channels
        is_gated = shape.activation == "swiglu"
        forward = 10 * hidden + rotated + shape.ffn_hidden_size * (3 if is_gated else 2)
        backward = 12 * hidden + rotated + shape.ffn_hidden_size * (5 if is_gated else 3)
        return LayerTraffic(float(bytes_per_element * forward), float(bytes_per_element * backward))
    if kind is LayerKind.HEAD and unit.role is Role.BACKBONE:
        logits = _LOGIT_BYTES * vocab_size
        return LayerTraffic(
            float(2 * bytes_per_element * hidden + 3 * logits), float(3 * bytes_per_element * hidden + 2 * logits)
        )
    moved = float(2 * bytes_per_element * hidden)
    return LayerTraffic(moved, moved)
