"""Adapters of Transformer Engine's linear layers, beside their own product: their rows, gradients and collectives are apart.

                          rows                      A          between A and B              B
    split by outputs      after the fused norm      whole      rows of all ranks            split
    split by inputs       the layer's input         split      sum, this rank's rows        whole

What is sent has the adapter's rank for its width, where local layers add the product before the sum of theirs (`adapter.py`).
The gradient of a whole matrix comes from the rows that a rank has, so it is summed under sequence parallelism only.
"""

from typing import Any

from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn import Module

from multimodal.model.adapter import adapter_of, is_engine_linear, splits_inputs
from multimodal.model.deferrable_linear import deferrable_linear


def adapt_engine_linears(layer: Module) -> None:
    """Let Transformer Engine's linear layers inside add the products of their adapters, where they have some."""
    linear: Any
    for linear in layer.modules():
        if is_engine_linear(linear) and adapter_of(linear) is not None:
            if hasattr(linear, "return_layernorm_output"):
                linear.return_layernorm_output = True
            linear.register_forward_hook(_add_adapter)


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return product and bias as megatron-core's callers expect them; output: also has the normalised rows of a fused norm."""
    product, *rest = output
    rows = inputs[0]
    if hasattr(linear, "return_layernorm_output"):
        product, rows = product if isinstance(product, tuple) else (product, rest.pop())
    adapter = adapter_of(linear)
    assert adapter is not None
    inner = deferrable_linear(rows, adapter.down, None) * adapter.scale
    group, is_cut = linear.tp_group, linear.sequence_parallel
    if linear.tp_size > 1 and splits_inputs(linear):
        inner = (reduce_scatter_to_sequence_parallel_region if is_cut else reduce_from_tensor_model_parallel_region)(
            inner, group=group
        )
    elif linear.tp_size > 1:
        inner = (gather_from_sequence_parallel_region if is_cut else copy_to_tensor_model_parallel_region)(inner, group=group)
    return product + deferrable_linear(inner, adapter.up, None), rest[0] if rest else None
