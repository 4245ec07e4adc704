"""Prints where two timelines of one plan (predicted and measured, or two schedules) differ; see docs/watch.md.

python tools/trace.py diff A.json B.json [--picture OUT.png|OUT.html] [--json]
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.schedule.chrome_trace import read_timeline, write_picture
from multimodal.values.action import ActionKind, Resource
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline
from tools.command_line import Parser, format_ranks, format_seconds, program

IDLE = "idle"
"""Time in which a lane computes nothing, whether or not it waits for a message."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds that one kind of action takes in one lane (or in all) in both timelines."""

    kind: str
    lane: int
    """-1: all lanes."""
    first_seconds: float
    second_seconds: float


@dataclass(frozen=True, slots=True)
class TimelineDifference:
    """Two timelines of the same lanes."""

    first_seconds: float
    second_seconds: float
    by_kind: tuple[Share, ...]
    """Over all lanes, without kinds that neither timeline has."""
    by_lane: tuple[Share, ...]
    """Per lane and kind, lane by lane."""


def compare_timelines(first: Timeline, second: Timeline) -> TimelineDifference:
    """Sum up both by kind and lane; idle is the whole step less computations. Raises DataError if lanes differ. O(events)."""
    if first.lanes != second.lanes:
        raise DataError(
            f"the timelines have different lanes ({_describe(first)} against {_describe(second)}); compare steps of the same plan"
        )
    sums = _sum(first), _sum(second)
    kinds = [*map(str, ActionKind), IDLE]
    by_lane = tuple(
        Share(kind, lane, *(found.get((lane, kind), 0.0) for found in sums))
        for lane in range(len(first.lanes))
        for kind in kinds
        if any((lane, kind) in found for found in sums)
    )
    by_kind = tuple(
        Share(kind, -1, sum(share.first_seconds for share in shares), sum(share.second_seconds for share in shares))
        for kind in kinds
        if (shares := [share for share in by_lane if share.kind == kind])
    )
    return TimelineDifference(first.duration_seconds, second.duration_seconds, by_kind, by_lane)


def _sum(timeline: Timeline) -> dict[tuple[int, str], float]:
    sums: dict[tuple[int, str], float] = defaultdict(float)
    computing: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        seconds = event.end_seconds - event.start_seconds
        sums[event.lane, str(event.action.kind)] += seconds
        if event.action.kind.resource is Resource.COMPUTE:
            computing[event.lane] += seconds
    for lane in range(len(timeline.lanes)):
        sums[lane, IDLE] = timeline.duration_seconds - computing[lane]
    return sums


def _describe(timeline: Timeline) -> str:
    return f"{len(timeline.lanes)} lanes on {sum(map(len, timeline.lanes))} ranks"


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="trace.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    diff = commands.add_parser("diff", help="Say where two steps of one plan spent their time.")
    diff.add_argument("first", type=Path, metavar="A", help="timeline_step_N.json.gz of --report-dir, or simulate.py --trace.")
    diff.add_argument("second", type=Path, metavar="B", help="Another one with the same lanes.")
    diff.add_argument("--picture", type=Path, metavar="OUT.png|OUT.html", help="Draw both above each other.")
    diff.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    return parser


def print_tables(difference: TimelineDifference, *, lanes: Sequence[Sequence[int]]) -> None:
    """Print the kinds of all lanes together, then every lane."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120, highlight=False)
    console.print(
        f"A takes {format_seconds(difference.first_seconds)}, B {format_seconds(difference.second_seconds)}: "
        f"{_change(difference.first_seconds, difference.second_seconds)}"
    )
    kinds = Table("lane time of all lanes", "A", "B", "B - A", "", box=None)
    for share in difference.by_kind:
        kinds.add_row(*_row(_name(share.kind), share))
    console.print(kinds)
    by_lane = Table("lane", "ranks", "", "A", "B", "B - A", "", box=None)
    for previous, share in zip((None, *difference.by_lane), difference.by_lane, strict=False):
        is_first = previous is None or previous.lane != share.lane
        ranks = format_ranks(lanes[share.lane])
        by_lane.add_row(str(share.lane) if is_first else "", ranks if is_first else "", *_row(_name(share.kind), share))
    console.print(by_lane)


def _name(kind: str) -> str:
    return f"{kind} (computes nothing)" if kind == IDLE else f"{kind} ({ActionKind(kind).resource})"


def _row(name: str, share: Share) -> tuple[str, ...]:
    first, second = share.first_seconds, share.second_seconds
    return name, format_seconds(first), format_seconds(second), format_seconds(second - first), _change(first, second)


def _change(first: float, second: float) -> str:
    return f"{second / first - 1:+.1%}" if first else "new" if second else ""


@program("trace.py")
def main(argv: Sequence[str]) -> None:
    """Compare and print according to the flags; raises BraidError."""
    flags = build_parser().parse_args(argv)
    first, second = read_timeline(flags.first), read_timeline(flags.second)
    difference = compare_timelines(first, second)
    if flags.picture is not None:
        write_picture({f"A: {flags.first.name}": first, f"B: {flags.second.name} ": second}, flags.picture)
    if flags.json:
        print(json.dumps(asdict(difference)))
    else:
        print_tables(difference, lanes=first.lanes)


if __name__ == "__main__":
    sys.exit(main())
