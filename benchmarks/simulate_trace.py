"""Simulates a run while nodes come and go: with templates, and with restarts from checkpoints."""

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from multimodal.plan.planners.templates.reconfigure import Pipeline, Reconfiguration, Reconfigurer
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_text

HEADER = ["seconds", "nodes"]


class NodeChange(NamedTuple):
    """A number of nodes lost or joined at once."""

    seconds: float
    change: int
    """Number of joined nodes, or minus the number of lost ones."""


def read_trace(path: str | Path, *, num_nodes: int) -> tuple[NodeChange, ...]:
    """Read lines `seconds,nodes` such as `3600,-2`, in order; # begins a comment. Raises ConfigError with the line."""
    changes: list[NodeChange] = []
    left = num_nodes
    for number, text in enumerate(read_text(path, error=ConfigError).splitlines(), start=1):
        row = next(csv.reader([text.partition("#")[0].strip()]), [])
        if not row or row == HEADER:
            continue
        where = f"{path}, line {number}"
        try:
            seconds, change = row
            found = NodeChange(float(seconds), int(change))
        except ValueError:
            raise ConfigError(f"{where}: expected seconds,nodes such as 3600,-2, found '{text[:80]}'; correct it") from None
        before = changes[-1].seconds if changes else 0.0
        if not before <= found.seconds < float("inf"):
            raise ConfigError(f"{where}: {found.seconds:g} s is before {before:g} s, or never; sort the lines by time")
        left += found.change
        if not 0 <= left <= num_nodes:
            raise ConfigError(
                f"{where}: {left} nodes would be there, of {num_nodes} at the start; correct the change or --num-gpus"
            )
        changes.append(found)
    return tuple(changes)


class Span(NamedTuple):
    """A period in which nothing changes."""

    start: float
    end: float
    num_nodes: int
    step_seconds: float | None
    """None: no steps are run."""
    state: str
    """The activity: `train`, `recover`, `restart`, or `wait` for nodes."""

    @property
    def num_steps(self) -> float:
        """Number of steps that fit into it."""
        return 0.0 if self.step_seconds is None else (self.end - self.start) / self.step_seconds


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds for which a run stops."""

    recovery: float = 3.0
    """Seconds for noticing a loss, agreeing, and forming new groups, in addition to copying layers."""
    restart: float = 120.0
    """Seconds for stopping all processes, starting them again and loading a checkpoint."""
    checkpoint_interval: float = 600.0
    """Seconds between two checkpoints, which take no time."""
    is_announced: bool = False
    """True: losses of nodes are known a step ahead, and wait for the end of the running step with templates."""


class Simulated(NamedTuple):
    """A simulated run."""

    spans: tuple[Span, ...]
    num_steps: float
    """Number of steps that were finished and not lost again."""
    changes: tuple[Reconfiguration, ...] = ()


@dataclass
class _Clock:
    """A run up to the current time: spans, and the steps that a failure does not undo."""

    spans: list[Span] = field(default_factory=list)
    kept: float = 0.0
    since_checkpoint: float = 0.0
    last_checkpoint: float = 0.0

    @property
    def now(self) -> float:
        return self.spans[-1].end if self.spans else 0.0

    def run(self, until: float, num_nodes: int, step_seconds: float | None, state: str) -> None:
        """Advance the run to a time."""
        if until > self.now:
            self.spans.append(Span(self.now, until, num_nodes, step_seconds, state))

    def step_end(self, seconds: float, step_seconds: float) -> float:
        """Return the end of the step that runs at a time, if steps begin now."""
        count = max(0.0, seconds - self.now) / step_seconds
        whole = int(count * (1 + 1e-12))
        return self.now + (whole + (count > whole)) * step_seconds

    def train(
        self, until: float, num_nodes: int, step_seconds: float, *, loses_last: bool, interval: float | None = None
    ) -> None:
        """Run steps; loses_last: the step that is running at the end is lost, otherwise it is finished first.

        interval: seconds between checkpoints; a later failure takes back the steps after the newest one; None: no step is taken
        back.
        """
        start = self.now
        if not loses_last:
            until = self.step_end(until, step_seconds)
        whole = float(int(max(0.0, until - start) / step_seconds * (1 + 1e-12)))
        self.run(until, num_nodes, step_seconds, "train")
        if interval is None:
            self.kept += whole
            return
        newest = until // interval * interval
        if newest > max(start, self.last_checkpoint):
            before = min(whole, float(int((newest - start) / step_seconds)))
            self.kept += self.since_checkpoint + before
            self.since_checkpoint, self.last_checkpoint = whole - before, newest
        else:
            self.since_checkpoint += whole


def simulate_templates(
    reconfigurer: Reconfigurer, changes: Sequence[NodeChange], *, until: float, pauses: Pauses, seed: int = 0
) -> Simulated:
    """Simulate a run; nodes are lost at random, with the running step; with too few, it saves, waits and restarts."""
    draw, clock = random.Random(seed), _Clock()
    pipelines: tuple[Pipeline, ...] | None = reconfigurer.start()
    step_seconds = reconfigurer.templates.step_seconds
    nodes, next_node = set(range(reconfigurer.templates.num_nodes)), reconfigurer.templates.num_nodes
    found: list[Reconfiguration] = []
    num_lost = num_joined = 0
    for seconds, change, end in _with_ends(changes, until):
        num_lost, num_joined = num_lost + max(0, -change), num_joined + max(0, change)
        cuts = change < 0 and not pauses.is_announced
        if pipelines is None:
            clock.run(seconds, len(nodes), None, "wait")
        elif change and not cuts and clock.step_end(seconds, step_seconds) > end:
            continue  # it takes effect with the next change, at which the same step runs
        else:
            clock.train(seconds, len(nodes), step_seconds, loses_last=cuts)
        lost = set(draw.sample(sorted(nodes), num_lost))
        joined = set(range(next_node, next_node + num_joined))
        nodes, next_node = (nodes - lost) | joined, next_node + num_joined
        now, has_changed = clock.now, num_lost + num_joined > 0
        num_lost = num_joined = 0
        if len(nodes) < reconfigurer.templates.fewest_nodes:
            pipelines = None
        elif pipelines is None:
            pipelines, step_seconds = reconfigurer.fresh(sorted(nodes))
            clock.run(min(end, now + pauses.restart), len(nodes), None, "restart")
        elif has_changed:
            chosen = reconfigurer.reconfigure(pipelines, lost=lost, joined=joined)
            found.append(chosen)
            pipelines, step_seconds = chosen.pipelines, chosen.step_seconds
            pause = pauses.restart if chosen.missing_layers else pauses.recovery + chosen.copy_seconds
            clock.run(min(end, now + pause), len(nodes), None, "restart" if chosen.missing_layers else "recover")
    return Simulated(tuple(clock.spans), clock.kept, tuple(found))


def simulate_restarts(
    step_seconds: Callable[[int], float | None], changes: Sequence[NodeChange], *, num_nodes: int, until: float, pauses: Pauses
) -> Simulated:
    """Simulate restarts from the newest checkpoint at every change; step_seconds: by the number of nodes, None if too few."""
    clock, nodes = _Clock(), num_nodes
    for seconds, change, end in _with_ends(changes, until):
        now_seconds = step_seconds(nodes)
        if now_seconds is None:
            clock.run(seconds, nodes, None, "wait")
        else:
            clock.train(seconds, nodes, now_seconds, loses_last=True, interval=pauses.checkpoint_interval)
        if change:
            nodes += change
            clock.since_checkpoint = 0.0
            now = clock.now
            clock.last_checkpoint = max(now, clock.last_checkpoint)
            if step_seconds(nodes) is not None:
                clock.run(min(end, now + pauses.restart), nodes, None, "restart")
    return Simulated(tuple(clock.spans), clock.kept + clock.since_checkpoint)


def _with_ends(changes: Sequence[NodeChange], until: float) -> Iterator[tuple[float, int, float]]:
    """Yield the time of each change, the change, and the time of the next one; finally the end, without a change."""
    inside = [each for each in changes if each.seconds < until]
    ends = [each.seconds for each in inside[1:]] + [until]
    for each, end in zip(inside, ends, strict=False):
        yield each.seconds, each.change, end
    yield until, 0, until
