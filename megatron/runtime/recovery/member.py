"""A rank's line to the keeper: it arrives, learns who is there, and leaves a generation at once when others are lost."""

import faulthandler
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import NoReturn

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megatron.runtime.launch.failure import Ending, RanksLostError, is_of_lost_ranks
from megatron.runtime.launch.meeting import Meeting
from megatron.runtime.launch.rank_place import RankPlace
from megatron.runtime.recovery.connections import Connections
from megatron.runtime.recovery.ledger import CUT, FLAGS, JOIN, OVER, Identity, Ledger, Report, Verdict, connect, open_ledger
from multimodal.values.errors import BraidError

_GRACE_SECONDS = 2.0
"""Seconds within which a loss becomes known after it has made something fail."""
_STUCK_SECONDS = 5.0
"""Seconds after which a wait on connections that are cut will never end; seen once in hundreds of losses with gloo."""
_END_SECONDS = 3.0
_SIGNS_OF_WAITING = (".wait(", "synchronize(")


class NodesJoinError(Exception):
    """All ranks have agreed to leave after the step, as nodes have joined."""


class Member:
    """This process in an elastic run."""

    def __init__(self, environ: Mapping[str, str], *, timeout_seconds: float, ending: Ending) -> None:
        """environ: as a supervisor sets it; timeout_seconds: without a sign of life after which this process is given up."""
        self.identity = Identity(
            int(environ["BRAID_NODE"]), int(environ["BRAID_INCARNATION"]), int(environ.get("LOCAL_RANK", "0"))
        )
        self._address, self._port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._timeout_seconds, self._ending = timeout_seconds, ending
        self.ledger = open_ledger(self._address, self._port)
        self.connections = Connections()
        self.generation = 0
        self.nodes_have_joined = False
        self.left_seconds = 0.0
        """When the last generation was left, by the system's clock."""
        self._is_finished = self._has_left = False
        self.place_in_step: Callable[[], object] = lambda: None
        """How far the main thread is with a step's work, or None outside of steps."""
        self._main = threading.main_thread().ident or 0
        for work in (self._beat, self._listen):
            threading.Thread(target=work, args=(open_ledger(self._address, self._port),), daemon=True).start()

    def open_store(self) -> Store:
        """Open another connection to the store."""
        return connect(self._address, self._port)

    def open_meeting(self, place: RankPlace) -> Meeting:
        """Return the meeting in which all ranks of the run fail together."""
        line: Future[Store] = Future()
        line.set_result(PrefixStore(FLAGS, self.open_store()))
        return Meeting(place, PrefixStore(FLAGS, self.open_store()), line)

    def finish(self) -> None:
        """Training has ended: what happens to others no longer matters."""
        self._is_finished = True

    def arrive(self, report: Report) -> Verdict:
        """Tell that this rank is ready for the next generation, and wait until it begins; ends the process if the run is over."""
        self.ledger.tell("arrived", **self.identity._asdict(), generation=self.generation + 1, report=asdict(report))
        wanted = self.generation + 1
        while True:
            verdict = self.ledger.verdict(wanted, seconds=1.0)
            if verdict is None:
                continue
            if verdict.exit_code is not None:
                self._ending.follow(verdict.exit_code)
            wanted += 1
            if self.identity.node in verdict.nodes:
                place = verdict.nodes.index(self.identity.node)
                if verdict.incarnations[place] == self.identity.incarnation:
                    break
        self.connections.forget()
        self.nodes_have_joined = self._has_left = False
        self.generation = verdict.generation
        return verdict

    def leave(self, problem: Exception) -> None:
        """Return if a problem is the loss of other ranks, with all connections cut; else raise it."""
        if not isinstance(problem, NodesJoinError):
            self._wait_for_cut(problem)
        self.connections.cut()
        self._has_left, self.left_seconds = True, time.time()

    def _wait_for_cut(self, problem: Exception) -> None:
        """Return once the connections are cut, which a loss leads to; raise the problem if it is not one."""
        if not self._is_cut_within(0.0 if isinstance(problem, BraidError) else _GRACE_SECONDS):
            if not is_of_lost_ranks(problem):
                raise problem
            self.ledger.tell("trouble", generation=self.generation)
            if not self._is_cut_within(self._timeout_seconds):
                raise RanksLostError("a connection is lost, and the keeper of the run does not answer") from problem

    def _is_cut_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.connections.is_cut and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.connections.is_cut

    def check(self) -> None:
        """Raise CutError when ranks of this generation are lost."""
        self.connections.check()

    def _listen(self, ledger: Ledger) -> None:
        """Take the keeper's signals."""
        generation, index = 0, 0
        while True:
            if generation != self.generation:
                generation, index = self.generation, 0
            try:
                signal = ledger.next_signal(generation, index, seconds=0.5)
            except RuntimeError as problem:
                self._end_without_store(problem)
            if self._is_finished:
                return
            if signal is None or generation != self.generation:
                continue
            index += 1
            if signal == CUT:
                self._cut_until_left()
            elif signal == JOIN:
                self.nodes_have_joined = True
            elif signal.startswith(OVER):
                time.sleep(_END_SECONDS)
                if self._is_finished:
                    return
                self._ending.follow(int(signal.partition(":")[2]))

    def _cut_until_left(self) -> None:
        """Cut all connections, and those that the main thread goes on to open, until it has noticed.

        If it waits on, this process ends, and the others go on without it. A rank with a GPU may wait for that, for longer.
        """
        self.connections.cut()
        since = time.monotonic()
        while self.connections.is_cut and not self._has_left:
            time.sleep(0.05)
            self.connections.cut_new()
            is_late = time.monotonic() - since > _STUCK_SECONDS
            if is_late and not torch.cuda.is_available() and self.connections.is_cut and _is_waiting(self._main):
                faulthandler.dump_traceback()
                self._ending.fail(
                    RanksLostError(
                        "a wait for other ranks goes on though all connections are cut; the others go on without this one"
                    )
                )

    def _end_without_store(self, problem: Exception) -> NoReturn:
        self._ending.fail(
            RanksLostError(f"the store at {self._address}:{self._port}, which outlives all ranks, is gone ({problem})")
        )

    def _beat(self, ledger: Ledger) -> None:
        """Give signs of life; not while a step's work does not get on, though nobody is waited for."""
        seen, since, count = None, time.monotonic(), 0
        while True:
            place = self.place_in_step()
            if place is None or place != seen or _is_waiting(self._main):
                seen, since = place, time.monotonic()
            if time.monotonic() - since < self._timeout_seconds:
                count += 1
                try:
                    ledger.set_flag(f"beat/{self.identity.name}", str(count))
                except RuntimeError as problem:
                    self._end_without_store(problem)
            time.sleep(min(1.0, self._timeout_seconds / 5))


def _is_waiting(thread: int) -> bool:
    """True if a thread waits for another process, as the line says at which it stands."""
    frame = sys._current_frames().get(thread)  # its callers are not looked at: Python 3.11 may crash over them
    if frame is None:
        return False
    path = frame.f_code.co_filename
    return f"{os.sep}distributed{os.sep}" in path or any(
        sign in linecache.getline(path, frame.f_lineno) for sign in _SIGNS_OF_WAITING
    )
