"""A rank's connection to the keeper: it arrives, learns of the members, and leaves a generation at once if others are lost."""

import ctypes
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.runtime.launch.failure import Ending, RanksLostError, is_of_lost_ranks
from megatron.runtime.launch.meeting import Meeting, StoreWatch, wait_until
from megatron.runtime.launch.rank_place import RankPlace
from megatron.runtime.recovery.connections import Connections
from megatron.runtime.recovery.ledger import (
    CUT,
    FLAGS,
    JOIN,
    OVER,
    PATIENCE,
    Identity,
    Ledger,
    Report,
    SealedStore,
    Verdict,
    connect,
    find_token,
    open_ledger,
)
from multimodal.values.errors import BraidError

_GRACE_SECONDS = 2.0
"""Seconds within which a loss becomes known after it has caused a failure."""
_STUCK_SECONDS = 1.0
"""Seconds after which a wait on cut connections is known to last until gloo's timeout."""
_END_SECONDS = 3.0


class NodesJoinError(Exception):
    """All ranks have agreed to leave after the step, as nodes have joined."""


class LeftBehindError(BaseException):
    """This thread has waited in vain, and another one trains in its place."""


class Member:
    """This process in an elastic run."""

    def __init__(self, environ: Mapping[str, str], *, timeout_seconds: float, ending: Ending) -> None:
        """environ: as set by a supervisor; timeout_seconds: time without a sign of life after which this process is given up."""
        node, incarnation = int(environ["BRAID_NODE"]), int(environ["BRAID_INCARNATION"])
        self.identity = Identity(node, incarnation, int(environ.get("LOCAL_RANK", "0")))
        self._address, self._port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._token = find_token(None, environ, makes_one=False)
        self._timeout_seconds, self._ending = timeout_seconds, ending
        self.ledger = open_ledger(self._address, self._port, self._token)
        self.ledger.set_flag(PATIENCE, str(timeout_seconds))
        self.connections = Connections()
        self.generation, self.nodes_have_joined = 0, False
        self.left_seconds = 0.0
        """Time at which this rank left the last generation, by the system's clock."""
        self._finished, self._has_left = threading.Event(), False
        self.place_in_step: Callable[[], object] = lambda: None
        """Returns the progress of the main thread within a step; None outside of steps."""
        self._trainer = threading.current_thread()
        """The thread that trains: only its failures concern the others."""
        self._lock = threading.Lock()
        self.go_on: Callable[[], object] | None = None
        """Continues training in another thread after this one has left a generation."""
        self._store_watch = StoreWatch(timeout_seconds, stopped=self._finished, end=self._end_with_frozen_store)
        for work in (self._beat, self._listen):
            ledger = open_ledger(self._address, self._port, self._token)
            threading.Thread(target=self._keep_up, args=(work, ledger), daemon=True).start()
        threading.Thread(target=self._store_watch.watch, daemon=True).start()

    def _keep_up(self, work: Callable[[Ledger], None], ledger: Ledger) -> None:
        """Do the work of a thread; ends this process if it fails, as without it all would wait for this rank."""
        try:
            work(ledger)
        except Exception as problem:
            self._ending.fail(problem)

    def open_store(self) -> Store:
        """Open another connection to the store."""
        return connect(self._address, self._port)

    def open_meeting(self, place: RankPlace) -> Meeting:
        """Return the meeting in which all ranks of the run fail together."""
        line: Future[Store] = Future()
        line.set_result(self._open_flags())
        return Meeting(place, self._open_flags(), line)

    def _open_flags(self) -> Store:
        """Open another connection to the flags: all of a store that a meeting uses."""
        return cast(Store, SealedStore(self.open_store(), self._token, FLAGS))

    def finish(self) -> None:
        """Record that training has ended: failures of other ranks no longer matter."""
        self._finished.set()

    def arrive(self, report: Report) -> Verdict:
        """Report that this rank is ready for the next generation, and wait until it begins; ends the process after the run."""
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
        with self._lock:
            self.connections.forget()
            self.nodes_have_joined = self._has_left = False
            self.generation = verdict.generation
        return verdict

    def leave(self, problem: Exception) -> None:
        """Return, with all connections cut, if a problem is the loss of other ranks; else raise it."""
        patience = 0.0 if isinstance(problem, BraidError) else _GRACE_SECONDS  # connections are cut after a loss
        if not isinstance(problem, NodesJoinError) and not self._is_cut_within(patience):
            if not is_of_lost_ranks(problem):
                raise problem
            self.ledger.tell("trouble", generation=self.generation)
            if not self._is_cut_within(self._timeout_seconds):
                raise RanksLostError("a connection is lost, and the keeper of the run does not answer") from problem
        with self._lock:
            self.check_in_charge()
            self.connections.cut()
            self._has_left, self.left_seconds = True, time.time()

    def check_in_charge(self) -> None:
        """Raise LeftBehindError in a thread that another one has replaced."""
        if threading.current_thread() is not self._trainer:
            raise LeftBehindError

    def _is_cut_within(self, seconds: float) -> bool:
        return wait_until(lambda: self.connections.is_cut, seconds=seconds, pause_seconds=0.01)

    def _listen(self, ledger: Ledger) -> None:
        generation, index = 0, 0
        while True:
            if generation != self.generation:
                generation, index = self.generation, 0
            try:
                signal = ledger.next_signal(generation, index, seconds=0.5)
            except RuntimeError as problem:
                self._end_without_store(f"is gone ({problem})")
            if self._finished.is_set():
                return
            if signal is None or generation != self.generation:
                continue
            index += 1
            if signal == CUT:
                self._cut_until_left(generation)
            elif signal == JOIN:
                self.nodes_have_joined = True
            elif signal.startswith(OVER):
                if self._finished.wait(_END_SECONDS):
                    return
                self._ending.follow(int(signal.partition(":")[2]))

    def _cut_until_left(self, generation: int) -> None:
        """Cut all connections, including those that the training thread still opens, until it has noticed.

        gloo does not end all waits: when a connection breaks during a message, its sender or receiver is not informed
        (`Pair::signalException` skips buffers whose transfer has begun), and waits until the timeout. A thread in such a wait is
        left behind, and another one continues training. On a GPU torch aborts communicators, which may take longer.
        """
        with self._lock:  # otherwise the next generation's connections might be cut
            if generation != self.generation:
                return
            self.connections.cut()
        seen: Standstill | None = None
        since = time.monotonic()
        while self.connections.is_cut and not self._has_left:
            time.sleep(0.05)
            self.connections.cut_new()
            found = find_standstill(self._trainer)
            if found is None or found != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > _STUCK_SECONDS and not torch.cuda.is_available():
                self._replace_trainer()

    def _replace_trainer(self) -> None:
        with self._lock:
            if self._has_left or not self.connections.is_cut or self.go_on is None:
                return
            error, ident = ctypes.py_object(LeftBehindError), ctypes.c_ulong(self._trainer.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)  # raised when its wait ends
            self._trainer = threading.Thread(target=self.go_on, name="trains on", daemon=True)
            self._has_left, self.left_seconds = True, time.time()
            self._trainer.start()

    def _end_without_store(self, found: str) -> NoReturn:
        """End this process, as the store is lost; found: what is wrong with it."""
        self._ending.fail(RanksLostError(f"the store at {self._address}:{self._port}, which outlives all ranks, {found}"))

    def _end_with_frozen_store(self, seconds: float) -> NoReturn:
        self._end_without_store(
            f"has not answered for {seconds:.0f} s (--elastic-timeout): its process, the supervisor that keeps the store, is "
            "frozen, or its node is gone"
        )

    def _beat(self, ledger: Ledger) -> None:
        """Give signs of life, except while a step makes no progress although it does not wait for another process."""
        seen, since, count = None, time.monotonic(), 0
        while True:
            place = self.place_in_step()
            if place is None or place != seen or is_waiting(self._trainer):
                seen, since = place, time.monotonic()
            try:
                if time.monotonic() - since < self._timeout_seconds:
                    count += 1
                    ledger.set_flag(f"beat/{'/'.join(map(str, self.identity))}", str(count))
                ledger.flag(PATIENCE)  # as torch's store does not answer what sets values
            except RuntimeError as problem:
                self._end_without_store(f"is gone ({problem})")
            self._store_watch.note_answer()
            time.sleep(min(1.0, self._timeout_seconds / 5))


_SIGNS_OF_WAITING = (".wait(", "synchronize(")
_ASLEEP = "S"
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Indices in /proc/self/task/N/stat after the thread's name."""


Standstill = tuple[int, int, int]
"""A thread's position in a wait (frame, instruction) and its processor time: if all stay, it has done nothing in between."""


def is_waiting(thread: threading.Thread) -> bool:
    """Return True if a thread waits for another process, judging by its current line."""
    frame = sys._current_frames().get(thread.ident or 0)  # without its callers: Python 3.11 may crash over them
    if frame is None:
        return False
    path = frame.f_code.co_filename
    line = linecache.getline(path, frame.f_lineno or 0)  # between lines there is none, though its type has it
    return f"{os.sep}distributed{os.sep}" in path or any(sign in line for sign in _SIGNS_OF_WAITING)


def find_standstill(thread: threading.Thread) -> Standstill | None:
    """Return the position of a thread that waits for another process; None if it computes, or waits for something else."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or not is_waiting(thread):
        return None
    with suppress(OSError):  # it has ended
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[_STATE] == _ASLEEP:
            return id(frame), frame.f_lasti, int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return None
