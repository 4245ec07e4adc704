"""Costs of techniques that published systems apply inside layers and Braid's runtime does not (docs/published.md)."""

from dataclasses import dataclass
from typing import NamedTuple

from multimodal.cost.seconds.layer_costs import ALONE, LayerCosts, LayerSeconds, Sharing
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.unit_load import CutLoad, UnitLoad


class AttentionWindow(NamedTuple):
    """Attention inside windows: most layers of a unit attend to a few tokens nearby, some to whole sequences."""

    unit: str
    num_tokens: int
    """Of a window."""
    full_share: float
    """Share of the transformer layers that attend to whole sequences."""


@dataclass(frozen=True)
class LayerExecution:
    """The way in which a system runs its layers; the defaults describe Braid's runtime."""

    repeated_collectives: float = 1.0
    """Share of a forward's tensor parallel collectives that full recomputation runs again. PyTorch's non-reentrant checkpointing
    ends as soon as it has all that the backward needs: a layer's last all-reduce is not repeated (0.5), nor, with sequence
    parallelism, its last reduce-scatter (0.75). Megatron's repeats the whole forward."""
    windows: tuple[AttentionWindow, ...] = ()
    """Units of which most layers attend inside windows; the models that Braid builds attend to whole images."""


DEFAULT_EXECUTION = LayerExecution()


@dataclass(frozen=True)
class SystemLayerCosts(LayerCosts):
    """`LayerCosts` of a system that runs its layers in its own way; without context parallelism, which none of them has."""

    execution: LayerExecution = DEFAULT_EXECUTION

    def seconds(
        self, unit: str, kind: str, load: UnitLoad, sharing: Sharing = ALONE, *, cut: CutLoad | None = None
    ) -> LayerSeconds:
        """Return the seconds of one layer, less the collectives that recomputation leaves out."""
        found = super().seconds(unit, kind, load, sharing, cut=cut)
        if sharing.recompute != "full" or sharing.context_parallel_size > 1:
            return found
        left_out = (1 - self.execution.repeated_collectives) * found.forward_waiting
        return found._replace(
            input_gradient=found.input_gradient - left_out,
            input_gradient_waiting=found.input_gradient_waiting - left_out,
        )

    def curves(self, unit: str, kind: str, *, tensor_parallel_size: int, context_parallel_size: int) -> LayerCurves:
        """Return what the mean layer's computations cost on one rank."""
        whole = super().curves(unit, kind, tensor_parallel_size=tensor_parallel_size, context_parallel_size=context_parallel_size)
        window = next((window for window in self.execution.windows if window.unit == unit), None)
        return whole if window is None else _windowed(whole, window)


def _windowed(curves: LayerCurves, window: AttentionWindow) -> LayerCurves:
    """Return the mean layer's curves: windows of w tokens turn n squared into n x w.

    Exact for the whole unit; a stage with more of the layers that attend to everything than another takes longer than this says.
    Windows that a border cuts are counted whole. Measured curves that are no quadratic stay as they are.
    """
    return LayerCurves(*(_inside(curve, window) if isinstance(curve, Quadratic) else curve for curve in curves))


def _inside(curve: Quadratic, window: AttentionWindow) -> Quadratic:
    inside = curve.quadratic * (1 - window.full_share) * window.num_tokens
    return curve._replace(linear=curve.linear + inside, quadratic=curve.quadratic * window.full_share)
