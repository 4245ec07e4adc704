"""User buffers of Transformer Engine: the LLM's tensor parallel collectives beside the products of their own layers.

Its kernels gather and scatter in buffers that are made once, and take tensors of exactly their size. So a microbatch that nearly
fills them is padded to their rows, with a sequence of its own, and others make their collectives without them.
"""

import torch
import torch.distributed as dist
from torch.nn import Module

LEAST_FILLED = 0.9
"""The least share of a buffer's rows for which a microbatch is padded to all of them."""
_OVERLAPS = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad")
_SCATTERED = {"method": "ring_exchange"}


def open_user_buffers(num_rows: int, hidden_size: int, *, tensor_parallel_size: int, dtype: torch.dtype) -> None:
    """Make this process's buffers; collective over all ranks, of which each block of `tensor_parallel_size` shares some."""
    from transformer_engine.pytorch.module.base import destroy_ub, initialize_ub  # type: ignore[import-not-found,unused-ignore]

    destroy_ub()  # those of a plan before
    initialize_ub(
        [num_rows, hidden_size],
        tensor_parallel_size,
        dtype=dtype,
        # Gradients of inputs are scattered beside their own product: beside that of a weight, frozen ones would have none.
        ub_cfgs={"qkv_dgrad": _SCATTERED, "fc1_dgrad": _SCATTERED},
        bootstrap_backend=dist.get_backend(),
    )


def overlaps_of(layer: Module) -> list[tuple[Module, str]]:
    """Return the settings of a layer's products by which they use buffers."""
    return [(module, name) for module in layer.modules() for name in _OVERLAPS if getattr(module, name, False)]
