"""Draws what planners reach: one bar per planner, its step divided into computing and kinds of idleness."""

from collections.abc import Mapping
from pathlib import Path

from multimodal.plan.planners.simulate_run import Prediction

COLOURS = ("#4878a8", "#b0b0b0", "#8c8c8c", "#e8a33d", "#d96b4c", "#c9c15a", "#8f6fae")


def draw_plans(predictions: Mapping[str, Prediction], path: str | Path) -> None:
    """Write a PNG with horizontal bars, shortest step first; needs matplotlib (the extra `plots`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(predictions.items(), key=lambda entry: entry[1].iteration_seconds, reverse=True)
    figure = Figure(figsize=(9.0, 1.4 + 0.4 * len(ordered)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    kinds = tuple(ordered[0][1].bubble)
    left = [0.0] * len(ordered)
    for kind, colour in zip(("computing", *kinds), COLOURS, strict=True):
        widths = [
            each.iteration_seconds * (each.bubble[kind] if kind in each.bubble else max(0.0, 1 - sum(each.bubble.values())))
            for _, each in ordered
        ]
        axes.barh([name for name, _ in ordered], widths, left=left, color=colour, label=kind, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (_, each) in enumerate(ordered):
        label = f" {each.iteration_seconds:.3g} s, MFU {each.mfu:.1%}"
        axes.text(each.iteration_seconds, row, label, va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * max(each.iteration_seconds for _, each in ordered))
    axes.set_xlabel("seconds per step, over all GPUs")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
