"""Writes timelines as one HTML page to zoom, move and click in, which needs no network."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.schedule.chrome_trace import describe_event
from multimodal.schedule.draw import action_look, draw_comparison, events_and_units, list_looks, row_label
from multimodal.values.action import ACTION_TABLE, ActionKind, Resource
from multimodal.values.timeline import Timeline, TimelineEvent

_TEMPLATE = Path(__file__).with_suffix(".html")


def write_picture(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write the page if the path ends with .html, or else a picture (`draw_comparison`)."""
    (write_timeline_page if path.suffix == ".html" else draw_comparison)(timelines, path)


def write_timeline_page(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write timelines above each other, by their titles, with a common time axis and the colors of `draw_timeline`.

    A click on an action says its times in all timelines that have it.
    """
    events, units = events_and_units(timelines)
    looks = list_looks(events, units)
    of_computation = {(kind, units[unit]): index for index, (_, kind, unit) in enumerate(looks)}
    of_resource = {ACTION_TABLE[kind].resource: index for index, (_, kind, _) in enumerate(looks)}

    def plain(event: TimelineEvent) -> list[Any]:
        kind, unit, resource = event.action.kind, event.action.unit, ACTION_TABLE[event.action.kind].resource
        is_computed = resource is Resource.COMPUTE
        look = of_computation[kind, unit] if is_computed else of_resource[resource]
        name, details = describe_event(event)
        told = ", ".join(f"{key} {value}" for key, value in details.items() if key not in ("unit", "microbatch"))
        times = [round(seconds, 9) for seconds in (event.start_seconds, event.end_seconds)]
        return [event.lane, look, str(event.action.microbatch) if is_computed else "", *times, f"{name}, {told}"]

    panels = [
        {
            "title": title,
            "seconds": timeline.duration_seconds,
            "lanes": [row_label(timeline, lane) for lane in range(len(timeline.lanes))],
            "events": [plain(event) for event in timeline.events],
        }
        for title, timeline in timelines.items()
    ]
    colors = [
        [action_look(kind, unit)["facecolor"], "#222" if kind is ActionKind.FORWARD else "#fff", name]
        for name, kind, unit in looks
    ]
    data = json.dumps({"panels": panels, "looks": colors}).replace("</", "<\\/")
    Path(path).write_text(_TEMPLATE.read_text(encoding="utf-8").replace("DATA", data), encoding="utf-8")
