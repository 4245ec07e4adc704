"""Attention inside windows: most layers of an encoder attend to a few tokens nearby, some to all of the image."""

from typing import NamedTuple

from multimodal.cost.layer_curves import LayerCurves, Quadratic


class AttentionWindow(NamedTuple):
    """How the layers of a unit attend."""

    unit: str
    num_tokens: int
    """Of a window."""
    full_share: float
    """Share of the transformer layers that attend to whole sequences."""


def windowed(curves: LayerCurves, window: AttentionWindow) -> LayerCurves:
    """Return the mean layer's curves: windows of w tokens turn n squared into n x w.

    Exact for the whole unit; a stage with more of the layers that attend to everything than another takes longer than this says.
    Windows that a border cuts are counted whole. Measured curves that are no quadratic stay as they are.
    """
    return LayerCurves(*(_windowed(curve, window) if isinstance(curve, Quadratic) else curve for curve in curves))


def _windowed(curve: Quadratic, window: AttentionWindow) -> Quadratic:
    inside = curve.quadratic * (1 - window.full_share) * window.num_tokens
    return curve._replace(linear=curve.linear + inside, quadratic=curve.quadratic * window.full_share)
