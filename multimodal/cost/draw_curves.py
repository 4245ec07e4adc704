"""Draw a layer's fitted curves through what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from multimodal.cost.layer_curves import LayerCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"forward": "#4c8fd6", "input_gradient": "#e8883a", "weight_gradient": "#3fa66b"}
_PANEL_INCHES = (4.2, 3.2)


class MeasuredLayer(NamedTuple):
    """One panel."""

    title: str
    curves: LayerCurves
    fitted: Sequence[int]
    """Sizes that the curves were fitted to; the others were held out."""
    seconds: Mapping[str, Mapping[int, float]]
    """Name of a curve -> size -> what was measured."""


def draw_curves(layers: Sequence[MeasuredLayer], path: str | Path) -> None:
    """Write a PNG with one panel per layer: lines are curves, dots what they were fitted to, rings what was held out.

    Needs matplotlib (the extra `plots`), which is imported here and draws without a display.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_PANEL_INCHES[0] * len(layers), _PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        _draw_layer(axes, layer)
    figure.savefig(path, dpi=110)


def _draw_layer(axes: "Axes", layer: MeasuredLayer) -> None:
    for name, colour in _COLOURS.items():
        measured = layer.seconds[name]
        if not any(measured.values()):
            continue
        sizes = np.geomspace(min(measured), max(measured), 60)
        axes.plot(
            sizes,
            [1e3 * getattr(layer.curves, name).at(size, size**2) for size in sizes],
            color=colour,
            label=name.replace("_", " "),
        )
        for is_fitted, fill in ((True, colour), (False, "none")):
            points = {size: 1e3 * value for size, value in measured.items() if (size in layer.fitted) == is_fitted}
            axes.scatter(list(points), list(points.values()), s=22, facecolors=fill, edgecolors=colour, zorder=3)
    axes.set(title=layer.title, xlabel="tokens", ylabel="milliseconds", xscale="log", yscale="log")
    axes.set_xticks(layer.fitted, [f"{size:,}" for size in layer.fitted])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize=8)
