"""Options of a run that its costs depend on."""

from dataclasses import dataclass
from typing import NamedTuple

from multimodal.cost.layers.layer import Implementation, Recompute


class AttentionWindow(NamedTuple):
    """Attention inside windows: most layers of a unit attend to a few tokens nearby, some to whole sequences."""

    unit: str
    num_tokens: int
    """Size of a window."""
    full_share: float
    """Share of the transformer layers that attend to whole sequences."""


@dataclass(frozen=True, slots=True)
class LayerExecution:
    """Differences of published systems from Braid's runtime; the defaults are those of the runtime, and planners count on them.

    Only the cost model knows these: they are there to predict what others measured (docs/published.md), not flags of a run.
    """

    repeated_collectives: float = 1.0
    """Share of a forward's tensor parallel collectives that full recomputation runs again. PyTorch's non-reentrant checkpointing
    ends as soon as it has all that the backward needs: a layer's last all-reduce is not repeated (0.5), nor, with sequence
    parallelism, its last reduce-scatter (0.75). Megatron's repeats the whole forward."""
    windows: tuple[AttentionWindow, ...] = ()
    """Units of which most layers attend inside windows; the models that Braid builds attend to whole images."""


DEFAULT_EXECUTION = LayerExecution()
"""Braid's runtime."""


@dataclass(frozen=True)
class RunOptions:
    """The flags of pretrain_mllm.py that costs depend on."""

    recompute: Recompute | None = None
    zero_stage: int = 1
    """Shared by replicas: 0 nothing, 1 optimizer state, 2 gradients as well, 3 weights as well."""
    sequence_parallel: bool = True
    transformer_impl: Implementation = "transformer_engine"
    """The layers whose activations are counted."""
    num_overlapped_parts: int = 1
    """Into which a transformer layer's tensor parallel collectives are cut, as are the products beside them; 1: not at all."""
    execution: LayerExecution = DEFAULT_EXECUTION
    """How published systems run a layer; not among the flags."""


DEFAULT_OPTIONS = RunOptions()
"""ZeRO-1, sequence parallelism, fused layers, nothing computed again."""
