"""How a run computes and keeps things, as far as its costs depend on it."""

from dataclasses import dataclass

from multimodal.cost.layer_execution import DEFAULT_EXECUTION, LayerExecution
from multimodal.cost.layers.layer import Implementation, Recompute


@dataclass(frozen=True)
class RunOptions:
    """What flags of pretrain_mllm.py say."""

    recompute: Recompute | None = None
    zero_stage: int = 1
    """What replicas share: 0 nothing, 1 optimizer state, 2 gradients as well, 3 weights as well."""
    sequence_parallel: bool = True
    transformer_impl: Implementation = "transformer_engine"
    """Which layers' activations are counted."""
    num_overlapped_parts: int = 1
    """Into which a transformer layer's tensor parallel collectives are cut, as are the products beside them; 1: not at all."""
    execution: LayerExecution = DEFAULT_EXECUTION
    """What published systems do in a layer; not among the flags."""


DEFAULT_OPTIONS = RunOptions()
"""ZeRO-1, sequence parallelism, fused layers, nothing computed again."""
