"""Writes timelines in Chrome's trace format, for ui.perfetto.dev and chrome://tracing, and on pages; reads them back."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multimodal.schedule.draw import action_look, draw_timelines, events_and_units, list_looks, row_label
from multimodal.values.action import ActionKind, Place, Resource, SampleSubset, SegmentRange
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline, TimelineEvent

_OWN_KEY = "braid_timeline"
_THREADS = {resource: number for number, resource in enumerate(Resource)}


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write one process per lane with one thread per resource (compute, send, receive, collective); times in microseconds.

    Arrows lead from sends to receives that waited for them. The timeline itself is stored under a key that trace viewers ignore,
    so that `read_timeline` returns it exactly. path: compressed if it ends with .gz.
    """
    records: list[dict[str, Any]] = []
    for lane, ranks in enumerate(timeline.lanes):
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        held = sorted({event.action.unit for event in timeline.events if event.lane == lane})
        records.append({"ph": "M", "pid": lane, "name": "process_name", "args": {"name": f"{' + '.join(held)} ({label})"}})
        records.append({"ph": "M", "pid": lane, "name": "process_sort_index", "args": {"sort_index": lane}})
        for resource, thread in _THREADS.items():
            records.append({"ph": "M", "pid": lane, "tid": thread, "name": "thread_name", "args": {"name": str(resource)}})
    for event in timeline.events:
        start, seconds = event.start_seconds, event.end_seconds - event.start_seconds
        where = {
            "ph": "X",
            "pid": event.lane,
            "tid": _THREADS[event.action.kind.resource],
            "ts": start * 1e6,
            "dur": seconds * 1e6,
        }
        name, details = describe_event(event)
        records.append({**where, "name": name, "cat": event.action.kind.name.lower(), "args": details})
    events = [*records, *_arrows(timeline)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", _OWN_KEY: timeline.to_dict()}).encode()
    Path(path).write_bytes(gzip.compress(text) if Path(path).suffix == ".gz" else text)


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline that `write_chrome_trace` wrote, or the plain form of one; raises DataError."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a timeline that a run or a simulation wrote")
    try:
        value = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
        return Timeline.from_dict(value.get(_OWN_KEY, value))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError, EOFError) as problem:
        raise DataError(
            f"{path}: is no timeline ({type(problem).__name__}: {problem}); give a timeline_step_N.json.gz of --report-dir, "
            "or what tools/simulate.py --trace wrote"
        ) from problem


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield both ends of each message of which there are two: a receive that need not wait has no event."""
    ends: dict[tuple[Any, ...], dict[Resource, TimelineEvent]] = defaultdict(dict)
    for event in timeline.events:
        action, resource = event.action, event.action.kind.resource
        if action.peer is not None:
            places = (Place(*action[1:5]), action.peer)
            ordered = places if resource is Resource.SEND else places[::-1]
            ends[action.kind.value[1], ordered, action.covers][resource] = event
    for number, both in enumerate(both for both in ends.values() if len(both) == 2):
        sent, received = both[Resource.SEND], both[Resource.RECEIVE]
        shared = {"id": number, "name": "message", "cat": "message"}
        yield {"ph": "s", "pid": sent.lane, "tid": _THREADS[Resource.SEND], "ts": sent.start_seconds * 1e6, **shared}
        where = {"pid": received.lane, "tid": _THREADS[Resource.RECEIVE], "bp": "e"}
        yield {"ph": "f", **where, "ts": received.end_seconds * 1e6, **shared}


def describe_event(event: TimelineEvent) -> tuple[str, dict[str, Any]]:
    """Return the name of an event's action, and what else there is to say of it."""
    action = event.action
    details: dict[str, Any] = {"unit": action.unit, "replica": action.replica, "stage": action.stage}
    if action.microbatch >= 0:
        details["microbatch"] = action.microbatch
    if isinstance(action.covers, SampleSubset):
        details["subset"] = action.covers.index
    elif action.covers is not None:
        what = "segments" if isinstance(action.covers, SegmentRange) else "layers"
        details[what] = f"{action.covers.first} to {action.covers.end - 1}"
    if action.peer is not None:
        details["peer"] = " ".join(map(str, action.peer))
    number = f" {action.microbatch}" if action.microbatch >= 0 else ""
    return f"{action.kind}{number} {action.unit}", details


_TEMPLATE = Path(__file__).with_name("timeline_page.html")


def write_picture(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write the page if the path ends with .html, or else a picture (`draw_timelines`)."""
    (write_timeline_page if path.suffix == ".html" else draw_timelines)(timelines, path)


def write_timeline_page(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write timelines above each other, by their titles, with a common time axis and the colors of `draw_timelines`.

    A click on an action says its times in all timelines that have it.
    """
    events, units = events_and_units(timelines)
    looks = list_looks(events, units)
    of_computation = {(kind, units[unit]): index for index, (_, kind, unit) in enumerate(looks)}
    of_resource = {kind.resource: index for index, (_, kind, _) in enumerate(looks)}

    def plain(event: TimelineEvent) -> list[Any]:
        kind, unit, resource = event.action.kind, event.action.unit, event.action.kind.resource
        is_computed = resource is Resource.COMPUTE
        look = of_computation[kind, unit] if is_computed else of_resource[resource]
        name, details = describe_event(event)
        told = ", ".join(f"{key} {value}" for key, value in details.items() if key not in ("unit", "microbatch"))
        times = [round(seconds, 9) for seconds in (event.start_seconds, event.end_seconds)]
        return [event.lane, look, str(event.action.microbatch) if is_computed else "", *times, f"{name}, {told}"]

    panels = []
    for title, timeline in timelines.items():
        lanes = [row_label(timeline, lane) for lane in range(len(timeline.lanes))]
        shown = list(map(plain, timeline.events))
        panels.append({"title": title, "seconds": timeline.duration_seconds, "lanes": lanes, "events": shown})
    dark, white = "#222", "#fff"
    colors = [
        [action_look(kind, unit)["facecolor"], dark if kind is ActionKind.FORWARD else white, name] for name, kind, unit in looks
    ]
    data = json.dumps({"panels": panels, "looks": colors}).replace("</", "<\\/")
    Path(path).write_text(_TEMPLATE.read_text(encoding="utf-8").replace("DATA", data), encoding="utf-8")
