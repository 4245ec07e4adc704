"""The picture of the loss by step."""

import statistics
from pathlib import Path


def draw_loss_curve(losses: list[tuple[int, float]], path: Path) -> None:
    """Loss by step as PNG, with its running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = zip(*losses, strict=True)
    axes.plot(steps, values, linewidth=0.6, color="#9ab8d8", label="each step")
    axes.plot(steps, _running_mean(values), linewidth=1.8, color="#1f4e8c", label="running mean")
    axes.set(xlabel="step", ylabel="loss per target token", title="Training loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _running_mean(values: tuple[float, ...]) -> list[float]:
    width = max(1, len(values) // 40)
    return [statistics.fmean(values[max(0, last - width) : last]) for last in range(1, len(values) + 1)]
