"""Draw a layer's fitted curves through what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from multimodal.cost.seconds.layer_curves import LayerCurves, PackedSize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"forward": "#4c8fd6", "input_gradient": "#e8883a", "weight_gradient": "#3fa66b"}
_PANEL_INCHES = (4.2, 3.2)


class MeasuredLayer(NamedTuple):
    """One panel."""

    title: str
    curves: LayerCurves
    fitted: Sequence[PackedSize]
    """Sizes that the curves were fitted to; all others were held out."""
    seconds: Mapping[str, Mapping[PackedSize, float]]
    """Name of a curve -> size -> what was measured."""


def draw_curves(layers: Sequence[MeasuredLayer], path: str | Path) -> None:
    """Write a PNG with one panel per layer: lines are curves, dots the points they were fitted to, rings the points held out.

    Whole lines are of the fewest sequences that the tokens were packed in, broken ones of more.

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
    counts = sorted({size.num_sequences for size in layer.fitted})
    for name, colour in _COLOURS.items():
        measured = layer.seconds[name]
        if not any(measured.values()):
            continue
        for count in counts:
            label = name.replace("_", " ") if count == counts[0] else None
            sizes = [size.num_tokens for size in measured if size.num_sequences == count]
            line = [PackedSize(round(tokens), count) for tokens in np.geomspace(min(sizes), max(sizes), 60)]
            curve = getattr(layer.curves, name)
            axes.plot(
                [size.num_tokens for size in line],
                [1e3 * curve.at(size.num_tokens, size.num_squared, count) for size in line],
                color=colour,
                linestyle="-" if count == counts[0] else "--",
                linewidth=1.2,
                label=label,
            )
        for is_fitted, fill in ((True, colour), (False, "none")):
            points = {size: 1e3 * value for size, value in measured.items() if (size in layer.fitted) == is_fitted}
            tokens = [size.num_tokens for size in points]
            axes.scatter(tokens, list(points.values()), s=18, facecolors=fill, edgecolors=colour, zorder=3)
    ticks = sorted({size.num_tokens for size in layer.fitted if size.num_sequences == counts[0]})
    axes.set(title=layer.title, xlabel="tokens", ylabel="milliseconds", xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize=8)
