"""Draws timelines above each other with one time axis, so that what took longer can be seen."""

from collections.abc import Mapping
from pathlib import Path

from multimodal.schedule.draw import LANE_HEIGHT_INCHES, draw_lanes, draw_legend
from multimodal.values.timeline import Timeline


def draw_comparison(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write a PNG with one panel per title, units in the same colours throughout; needs matplotlib (the extra `plots`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    events = sorted((event for timeline in timelines.values() for event in timeline.events), key=lambda each: each.start_seconds)
    together = Timeline(next(iter(timelines.values())).lanes, tuple(events))
    units = tuple(dict.fromkeys(event.action.unit for event in events))
    heights = [1.0 + LANE_HEIGHT_INCHES * len(timeline.lanes) for timeline in timelines.values()]
    width = min(20.0, max(9.0, 0.16 * len(events) / max(1, len(together.lanes))))
    figure = Figure(figsize=(width, 0.6 + sum(heights)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)
    seconds_per_inch = max(together.duration_seconds, 1e-9) / (width - 2)
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        draw_lanes(axes, timeline, units=units, seconds_per_inch=seconds_per_inch, title=title)
        axes.axvline(timeline.duration_seconds, color="#444444", linewidth=0.8, linestyle=":")
        axes.tick_params(axis="x", labelbottom=True)
        axes.set_xlim(0, max(together.duration_seconds, 1e-9))
    draw_legend(figure, together, units=units)
    figure.savefig(path)
