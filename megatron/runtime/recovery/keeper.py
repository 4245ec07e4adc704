"""Decides which nodes are in an elastic run: one process beside the ranks, which is told of deaths, silence and arrivals.

A generation is a period in which the same nodes are in the run. It ends when one of them is lost (its ranks are told to leave at
once) or another one arrives (they leave after the step). All remaining ranks then arrive for the next generation, which begins
when all have arrived that the keeper does not know to be lost. Nodes lost meanwhile are not waited for.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.runtime.recovery.ledger import CUT, JOIN, OVER, PATIENCE, PATIENCE_SECONDS, Ledger, Report, Verdict

logger = logging.getLogger(__name__)
_LOOK_SECONDS = 0.05
_START_SECONDS = 60.0
"""Seconds after which the keeper reports which nodes of the start are missing."""
_END_SECONDS = 30.0
"""Seconds for supervisors to leave once the run is over; those of lost nodes never do."""


@dataclass
class _Node:
    incarnation: int
    num_ranks: int
    is_alive: bool = True
    arrived: dict[int, Report] = field(default_factory=dict)
    """Local rank -> report for the coming generation."""
    beats: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Local rank -> the last sign of life, and the time at which it was new."""

    @property
    def is_here(self) -> bool:
        """True if all of its ranks have arrived."""
        return self.is_alive and len(self.arrived) == self.num_ranks


class Keeper:
    """Keeps the list of nodes; `step` handles new events, and `run` repeats that until the run is over."""

    def __init__(self, ledger: Ledger, *, num_nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """num_nodes: nodes at the start, numbered from 0."""
        self._ledger, self._num_nodes, self._clock = ledger, num_nodes, clock
        self._nodes: dict[int, _Node] = {}
        self._members: tuple[int, ...] = ()
        self._generation = 0
        """The last generation with a verdict."""
        self._is_ending = True
        """True while the next generation is awaited."""
        self._is_cut = False
        self._num_signals = self._num_supervisors_left = 0
        self._seconds: dict[str, float] = {}
        self._since = clock()
        """Time at which ranks began to leave; infinite while they finish a step before nodes join, which may take any time."""
        self.exit_code: int | None = None
        """Set when the run is over."""
        self._over_at = math.inf
        self._has_said_who_is_missing = self._has_said_what_is_wrong = False

    def run(self, *, num_supervisors: int) -> None:
        """Decide until the run is over and all supervisors have left, or have had the time to leave."""
        while self._num_supervisors_left < num_supervisors and self._clock() - self._over_at < _END_SECONDS:
            self.step(seconds=_LOOK_SECONDS)

    def step(self, *, seconds: float = 0.0) -> None:
        """Handle the next event, if it comes within `seconds`, and make the decisions that follow."""
        event = self._ledger.next_event(seconds=max(seconds, 0.001))
        if event is not None:
            # An event that cannot be understood must not end the keeper, without which the run stands still.
            try:
                getattr(self, f"_on_{event.pop('kind')}")(**event)
            except (AttributeError, KeyError, TypeError, ValueError):
                if not self._has_said_what_is_wrong:
                    self._has_said_what_is_wrong = True
                    logger.exception("ignored an event that cannot be understood; are all supervisors and ranks of one version?")
        self._look_for_silence()
        if (code := self._ledger.flag("failed")) is not None:
            self._on_finished(int(code))
        self._decide()

    def _on_started(self, *, node: int, incarnation: int, num_ranks: int) -> None:
        if node in self._nodes and self._nodes[node].is_alive:
            self._lose(node)  # with its supervisor, before its absence was noticed
        self._nodes[node] = _Node(incarnation, num_ranks)

    def _on_died(self, *, node: int, incarnation: int) -> None:
        if node in self._nodes and self._nodes[node].incarnation == incarnation:
            self._lose(node)

    def _on_trouble(self, *, generation: int) -> None:
        """Handle a lost connection of some rank: the lost node will be known soon, and all others must leave in any case."""
        if generation == self._generation and not self._is_cut:
            self._end_generation(CUT)

    def _on_arrived(self, *, node: int, incarnation: int, local_rank: int, generation: int, report: Mapping[str, Any]) -> None:
        known = self._nodes.get(node)
        if known is None or known.incarnation != incarnation or not known.is_alive:
            return
        known.arrived[local_rank] = arrived = Report(**{**report, "pipelines": tuple(report["pipelines"])})
        if node in self._members and generation > self._generation:
            self._since = min(self._since, self._clock())  # with one rank all others leave the step
            if arrived.is_spare:
                self._members = tuple(member for member in self._members if member != node)
            elif not self._is_ending and arrived.waits:  # for nodes, as all others do
                self._is_ending, self._since = True, self._clock()
            elif not self._is_ending:
                self._end_generation(CUT)

    def _on_left(self) -> None:
        self._num_supervisors_left += 1

    def _on_recovered(self, **seconds: float) -> None:
        """Ignore the event, which holds figures for later readers of the list."""

    def _lose(self, node: int) -> None:
        self._nodes[node].is_alive = False
        self._nodes[node].arrived.clear()
        if node in self._members:
            self._members = tuple(member for member in self._members if member != node)  # if it starts again, it is a newcomer
            self._end_generation(CUT)

    def _end_generation(self, signal: str) -> None:
        if signal == CUT:
            if self._is_cut:
                return
            self._is_cut = True
            self._seconds = {"lost": time.time()}
        self._is_ending, self._since = True, math.inf if signal == JOIN else self._clock()
        self._signal(signal)

    def _signal(self, what: str) -> None:
        self._ledger.signal(self._generation, self._num_signals, what)
        self._num_signals += 1

    def _look_for_silence(self) -> None:
        """Declare nodes dead whose ranks give no sign of life, or do not arrive, within the user's timeout."""
        now = self._clock()
        patience_seconds = float(self._ledger.flag(PATIENCE) or PATIENCE_SECONDS)
        for node, known in self._nodes.items():
            if not known.is_alive:
                continue
            for local_rank in range(known.num_ranks):
                beat = self._ledger.flag(f"beat/{node}/{known.incarnation}/{local_rank}")
                if beat is not None and known.beats.get(local_rank, (0, 0.0))[0] < int(beat):  # one put back is no new one
                    known.beats[local_rank] = int(beat), now
            is_time_over = now - self._since > patience_seconds
            is_late = self._is_ending and node in self._members and not known.is_here and is_time_over
            if is_late or any(now - since > patience_seconds for _, since in known.beats.values()):
                self._ledger.set_flag(f"kill/{node}/{known.incarnation}")
                self._lose(node)

    def _on_finished(self, exit_code: int) -> None:
        if self.exit_code is None:
            self.exit_code, self._over_at = exit_code, self._clock()
            self._ledger.set_flag("over")
            self._signal(f"{OVER}:{exit_code}")
            for generation in (self._generation + 1, self._generation + 2):
                self._ledger.publish(Verdict(generation, exit_code=exit_code))

    def _decide(self) -> None:
        if self.exit_code is not None:
            return
        newcomers = [node for node, known in sorted(self._nodes.items()) if node not in self._members and known.is_here]
        if not self._is_ending:
            if any(not report.is_spare for node in newcomers for report in self._nodes[node].arrived.values()):
                self._end_generation(JOIN)
            return
        if not self._members and not self._is_start_complete():
            return
        survivors = [node for node in self._members if self._nodes[node].is_alive]
        if not all(self._nodes[node].is_here for node in survivors):
            return
        present = [*survivors, *newcomers]
        reports = [report for node in present for report in self._nodes[node].arrived.values()]
        if not reports or all(report.waits for report in reports):
            return
        self._begin(present)

    def _is_start_complete(self) -> bool:
        """True if every node of the start has arrived or is lost."""
        found = {node: self._nodes.get(node) for node in range(self._num_nodes)}
        missing = [node for node, known in found.items() if known is None or (known.is_alive and not known.is_here)]
        if missing and self._clock() - self._since > _START_SECONDS and not self._has_said_who_is_missing:
            self._has_said_who_is_missing = True
            logger.warning("the run waits for nodes %s to start; are their supervisors running?", ", ".join(map(str, missing)))
        return not missing

    def _begin(self, nodes: list[int]) -> None:
        by_node = {node: list(self._nodes[node].arrived.values()) for node in nodes}
        holding = [node for node in nodes if any(report.done_steps is not None for report in by_node[node])]
        states = [report for node in holding for report in by_node[node] if report.done_steps is not None]
        last = max(states, key=lambda report: report.done_steps or 0, default=Report())
        self._generation += 1
        incarnations = tuple(self._nodes[node].incarnation for node in nodes)
        pipelines = max(states, key=lambda report: report.formed, default=Report()).pipelines
        state = incarnations, tuple(holding), last.done_steps, last.outcome, pipelines
        seconds = {**self._seconds, "decided": time.time()}
        self._ledger.publish(Verdict(self._generation, tuple(nodes), *state, seconds=seconds))
        self._members = tuple(nodes)
        self._seconds, self._num_signals, self._is_ending, self._is_cut = {}, 0, False, False
        for node in nodes:
            self._nodes[node].arrived.clear()
