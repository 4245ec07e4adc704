"""Writes timelines in Chrome's trace format, for ui.perfetto.dev and chrome://tracing, and reads them back."""

import json
from pathlib import Path
from typing import Any

from multimodal.values.action import ACTION_TABLE, Resource, SampleSubset, SegmentRange
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline, TimelineEvent

_OWN_KEY = "braid_timeline"
_THREADS = {resource: number for number, resource in enumerate(Resource)}


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write one process per lane with one thread per resource (compute, send, receive, collective); times in microseconds.

    The timeline itself is stored under a key that trace viewers ignore, so that `read_timeline` returns it exactly.
    """
    events = [*_names(timeline), *(_event(event) for event in timeline.events)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", _OWN_KEY: timeline.to_dict()}))


def read_timeline(path: str | Path) -> Timeline:
    """Read a timeline from `Timeline.to_file`'s JSON or from a trace that `write_chrome_trace` wrote; raises DataError."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a timeline that a run or a simulation wrote")
    try:
        value = json.loads(path.read_text())
        return Timeline.from_dict(value.get(_OWN_KEY, value))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as problem:
        raise DataError(
            f"{path}: is no timeline ({type(problem).__name__}: {problem}); give a timeline_step_N.json of --report-dir, "
            "or what tools/simulate.py --trace wrote"
        ) from problem


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for lane, ranks in enumerate(timeline.lanes):
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        held = sorted({event.action.unit for event in timeline.events if event.lane == lane})
        records.append({"ph": "M", "pid": lane, "name": "process_name", "args": {"name": f"{' + '.join(held)} ({label})"}})
        records.append({"ph": "M", "pid": lane, "name": "process_sort_index", "args": {"sort_index": lane}})
        for resource, thread in _THREADS.items():
            records.append({"ph": "M", "pid": lane, "tid": thread, "name": "thread_name", "args": {"name": str(resource)}})
    return records


def _event(event: TimelineEvent) -> dict[str, Any]:
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
    return {
        "ph": "X",
        "name": f"{action.kind}{number} {action.unit}",
        "cat": action.kind.name.lower(),
        "pid": event.lane,
        "tid": _THREADS[ACTION_TABLE[action.kind].resource],
        "ts": event.start_seconds * 1e6,
        "dur": (event.end_seconds - event.start_seconds) * 1e6,
        "args": details,
    }
