"""How published systems run the layers of a model, as far as their seconds depend on it."""

from dataclasses import dataclass

from multimodal.cost.attention_window import AttentionWindow


@dataclass(frozen=True, slots=True)
class LayerExecution:
    """What published systems do and Braid's runtime does not; the defaults are what the runtime does, and what planners count on.

    Only the cost model knows these: they are there to predict what others measured (docs/published.md), not flags of a run.
    """

    repeated_collectives: float = 1.0
    """Share of a forward's tensor parallel collectives that full recomputation runs again. PyTorch's non-reentrant checkpointing
    ends as soon as it has all that the backward needs: a layer's last all-reduce is not repeated (0.5), nor, with sequence
    parallelism, its last reduce-scatter (0.75). Megatron's repeats the whole forward."""
    windows: tuple[AttentionWindow, ...] = ()
    """Units of which most layers attend inside windows; the models that Braid builds attend to whole images."""


DEFAULT_EXECUTION = LayerExecution()
"""What Braid's runtime does."""
