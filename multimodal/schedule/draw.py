"""Draws timelines: one row per lane, one box per action, time to the right."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.values.action import ActionKind, Resource
from multimodal.values.timeline import Timeline, TimelineEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNIT_COLORS = (
    ("#4c8fd6", "#a9cdf0", "#2b5f99"),
    ("#e8883a", "#f8cfa5", "#a85a17"),
    ("#3fa66b", "#b0dec3", "#256c43"),
    ("#9a6cc4", "#d9c6ec", "#66418a"),
)
"""(backward or input gradient, forward, weight gradient) per unit in one hue; colors repeat from the fifth unit on."""
_REDUCE_COLOR = "#d64550"
_SEND_COLOR = "#9a9a9a"
_FRAME_COLOR = "#222222"
_WAIT_COLOR = "#f6f6f6"
_COMPUTATIONS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
}
_OTHERS = {Resource.SEND: "sending", Resource.RECEIVE: "waiting for a message", Resource.COLLECTIVE: "reducing gradients"}
_LANE_HEIGHT_INCHES = 0.42
_LARGEST_NUMBER_POINTS = 8.0
_SMALLEST_NUMBER_POINTS = 4.5


def draw_timelines(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write timelines as PNG above each other, a panel per title, with a common time axis and the same colors.

    Rows are lanes, labelled with ranks and units; the number in a box is its microbatch. Forwards are light, backwards and input
    gradients dark, weight gradients darkest in their unit's color; a lane's later layer ranges have a dark frame; work inside a
    computation is a lower box in it; waiting for a message is hatched, idle time is white. Needs matplotlib (the extra `plots`),
    which is imported here and draws without a display.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events, units = events_and_units(timelines)
    lanes = Counter((title, event.lane) for title, timeline in timelines.items() for event in timeline.events)
    width = min(20.0, max(9.0, 0.16 * max(lanes.values(), default=0)))
    heights = [1.0 + _LANE_HEIGHT_INCHES * len(timeline.lanes) for timeline in timelines.values()]
    figure = Figure(figsize=(width, 0.6 + sum(heights)), dpi=110, layout="constrained")
    panels = figure.subplots(len(heights), squeeze=False, sharex=True, height_ratios=heights)
    seconds = max(1e-9, *(timeline.duration_seconds for timeline in timelines.values()))
    for axes, (title, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        _draw_lanes(axes, timeline, units=units, seconds_per_inch=seconds / (width - 2), title=title)
        if len(timelines) > 1:
            axes.axvline(timeline.duration_seconds, color="#444444", linewidth=0.8, linestyle=":")
        axes.tick_params(axis="x", labelbottom=True)
        axes.set_xlim(0, seconds)
    handles = [Patch(label=name, **action_look(kind, index)) for name, kind, index in list_looks(events, units)]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_lanes(axes: "Axes", timeline: Timeline, *, units: tuple[str, ...], seconds_per_inch: float, title: str) -> None:
    """Draw all lanes of a timeline; units: in the order of their colors."""
    first_stages: dict[tuple[int, str, int], int] = {}
    for event in timeline.events:
        held = event.lane, event.action.unit, event.action.replica
        first_stages[held] = min(event.action.stage, first_stages.get(held, event.action.stage))
    ends: dict[int, float] = {}
    for event in sorted(timeline.events, key=lambda each: (each.start_seconds, -each.end_seconds)):
        is_later_range = event.action.stage > first_stages[(event.lane, *event.action[1:3])]
        is_computed = event.action.kind.resource is Resource.COMPUTE
        is_inside = is_computed and event.end_seconds <= ends.get(event.lane, 0.0)
        kind, start, seconds = event.action.kind, event.start_seconds, event.end_seconds - event.start_seconds
        look = action_look(kind, units.index(event.action.unit))
        if is_inside or (is_later_range and is_computed):
            look["edgecolor"] = _FRAME_COLOR
        height, line_width = (0.5, 0.3) if is_inside else (0.8, 0.6)
        axes.barh(event.lane, seconds, left=start, height=height, linewidth=line_width, **look)
        label = str(event.action.microbatch)  # the width of a digit is 0.64 of its type size
        points = min(_LARGEST_NUMBER_POINTS, 72 * seconds / seconds_per_inch / (0.64 * len(label) + 0.3))
        if is_computed and points >= _SMALLEST_NUMBER_POINTS:
            middle, color = start + seconds / 2, "#222222" if kind is ActionKind.FORWARD else "white"
            axes.text(middle, event.lane, label, fontsize=points, color=color, clip_on=True, ha="center", va="center_baseline")
        if is_computed:
            ends[event.lane] = max(event.end_seconds, ends.get(event.lane, 0.0))
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_yticks(range(len(timeline.lanes)), [row_label(timeline, lane) for lane in range(len(timeline.lanes))], fontsize=8)
    axes.set_ylim(len(timeline.lanes) - 0.5, -0.5)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def action_look(kind: ActionKind, unit_index: int) -> dict[str, Any]:
    """Return the look of an action's box: colors by resource, and for computations by direction and unit."""
    resource = kind.resource
    if resource is Resource.COLLECTIVE:
        return {"facecolor": _REDUCE_COLOR, "edgecolor": "white"}
    if resource is Resource.SEND:
        return {"facecolor": _SEND_COLOR, "edgecolor": "white"}
    if resource is Resource.RECEIVE:
        return {"facecolor": _WAIT_COLOR, "edgecolor": "#d2d2d2", "hatch": "////"}
    backward, forward, weight_gradient = _UNIT_COLORS[unit_index % len(_UNIT_COLORS)]
    colors = {ActionKind.FORWARD: forward, ActionKind.WEIGHT_GRADIENT: weight_gradient}
    return {"facecolor": colors.get(kind, backward), "edgecolor": "white"}


def row_label(timeline: Timeline, lane: int) -> str:
    """Return the row's label: ranks, then the stages of the lane, such as `rank 2  llm 0 stage 1`."""
    ranks = timeline.lanes[lane]
    places = sorted({event.action[1:4] for event in timeline.events if event.lane == lane})
    held = ", ".join(f"{unit} {replica} stage {stage}" for unit, replica, stage in places)
    return f"{held or 'idle'}   {'rank' if len(ranks) == 1 else 'ranks'} {_rank_ranges(ranks)}"


def _rank_ranges(ranks: tuple[int, ...]) -> str:
    """Return consecutive ranks as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def list_looks(events: Sequence[TimelineEvent], units: tuple[str, ...]) -> list[tuple[str, ActionKind, int]]:
    """Return (name, kind, number of the unit) of all looks: of each unit's computations, and of what the other resources do."""
    seen = {(event.action.kind, event.action.unit) for event in events}
    found = [
        (f"{unit} {name}", kind, index)
        for index, unit in enumerate(units)
        for kind, name in _COMPUTATIONS.items()
        if (kind, unit) in seen
    ]
    kinds = [kind for kind in ActionKind if any(kind is each for each, _ in seen)]
    for resource, name in _OTHERS.items():
        found += [(name, kind, 0) for kind in kinds if kind.resource is resource][:1]
    return found


def events_and_units(timelines: Mapping[str, Timeline]) -> tuple[list[TimelineEvent], tuple[str, ...]]:
    """Return the events of all timelines by their starts, and the units in the order of their colors."""
    events = sorted((event for timeline in timelines.values() for event in timeline.events), key=lambda each: each.start_seconds)
    return events, tuple(dict.fromkeys(event.action.unit for event in events))
