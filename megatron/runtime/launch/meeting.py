"""The store in which ranks meet before any collective, and report failures: torchrun's, or rank 0's at MASTER_ADDR."""

import math
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar, cast

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron.runtime.launch.rank_place import RankPlace, StoreGoneError
from multimodal.values.errors import first_line

POLL_SECONDS = 0.2
_NAME_SECONDS = 30.0
"""Seconds after which a MASTER_ADDR that cannot be resolved is considered wrong."""
_LATE_SECONDS = 15.0
"""Seconds for which a failure is kept for ranks that have not come yet."""
_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 3.0
"""Seconds in which a store that is there answers one request."""
_RETURN_SECONDS = 5.0
"""Seconds to wait for a store that vanishes while a rank connects to it."""
_HERE, _FIRST_IS_HERE, _CLAIMED, _FAILED, _DONE, _LEFT = "here", "first-is-here", "claimed", "failed", "done", "left"
_ROLL_CALL = "roll-call"
_TROUBLE = "trouble"
"""Key that is set with a failure and with a roll call, so that ranks only need to poll one key."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Meeting:
    """One rank's connections to the store of this attempt."""

    place: RankPlace
    store: Store
    """The connection for common decisions of the ranks."""
    opened_line: Future[Store]
    """A second connection to the same store, which reports a rank's failure while the first one waits."""

    @property
    def line(self) -> Store:
        """The second connection, once it is open."""
        return self.opened_line.result()

    def wait_for_line(self) -> None:
        """Wait until the second connection is open, which takes a few seconds at most. Raises StoreGoneError."""
        ask_within(_LATE_SECONDS, lambda: self.line)

    def claim_failure(self) -> bool:
        """Return True if this rank is the first to fail, and so the one that reports to the user. Raises StoreGoneError."""
        self.wait_for_line()
        return ask_within(_ANSWER_SECONDS, lambda: self.line.add(_CLAIMED, 1)) == 1

    def announce_failure(self, exit_code: int) -> None:
        """Ask all ranks to end, after the user has been informed. Raises StoreGoneError."""

        def announce() -> None:
            self.line.set(_FAILED, str(exit_code))
            self.line.set(_TROUBLE, "1")

        ask_within(_ANSWER_SECONDS, announce)

    def failure(self, over: Store | None = None) -> int | None:
        """Return the exit code of the rank that failed; None if none has. over: the connection to use."""
        store = over or self.line
        return int(store.get(_FAILED)) if store.check([_TROUBLE]) and store.check([_FAILED]) else None

    def wait_for_failure(self, *, seconds: float) -> int | None:
        """Wait until the rank that failed first has reported, and return its exit code, or None. Raises StoreGoneError."""
        return wait_until(lambda: ask_within(_ANSWER_SECONDS, self.failure), seconds=seconds)

    def say_first_is_here(self) -> None:
        """Announce, on rank 0, that its flags are valid: a rank with invalid flags is then the only one."""
        self.store.set(_FIRST_IS_HERE, "1")

    def knows_of_first(self) -> bool:
        """Return True if rank 0 has come, or failed."""
        return self.line.check([_FIRST_IS_HERE]) or self.failure() is not None

    def call_roll(self, *, seconds: float) -> dict[int, str]:
        """Ask all other ranks for their state; returns the answers that arrive in time. Raises StoreGoneError."""

        def call() -> None:
            self.line.set(_ROLL_CALL, "1")
            self.line.set(_TROUBLE, "1")

        ask_within(seconds, call)
        others, deadline = set(range(self.place.size)) - {self.place.rank}, time.monotonic() + seconds

        def find_answers() -> dict[int, str]:
            keys = {rank: f"{_ROLL_CALL}/{rank}" for rank in sorted(others)}
            return {rank: self.line.get(key).decode() for rank, key in keys.items() if self.line.check([key])}

        while True:
            answers = ask_within(_ANSWER_SECONDS, find_answers)
            if len(answers) == len(others) or time.monotonic() > deadline:
                return answers
            time.sleep(POLL_SECONDS)

    def roll_is_called(self) -> bool:
        """Return True if some rank asks for the state of the others."""
        return self.line.check([_TROUBLE]) and self.line.check([_ROLL_CALL])

    def answer_roll(self, doing: str) -> None:
        """Answer with this rank's state."""
        self.line.set(f"{_ROLL_CALL}/{self.place.rank}", doing)

    def wait_for_all(self, *, seconds: float) -> None:
        """Wait until every rank has called this, so that no rank sees a broken connection, and the store outlives its users."""

        def wait() -> None:
            if self.store.add(_DONE, 1) < self.place.size:
                wait_until(lambda: self.store.add(_DONE, 0) >= self.place.size, seconds=seconds)
            if self.store.add(_LEFT, 1) < self.place.size and self.place.keeps_store:
                wait_until(lambda: self.store.add(_LEFT, 0) >= self.place.size, seconds=seconds)

        ask_within(2 * seconds + 1.0, wait)

    def leave(self, *, seconds: float) -> None:
        """Report that this process ends by a failure and, if it keeps the store, wait until all others have reported the same."""

        def leave() -> None:
            if self.line.add(_LEFT, 1) < self.place.size and self.place.keeps_store:
                patience = seconds if self.line.add(_HERE, 0) >= self.place.size else max(seconds, _LATE_SECONDS)
                wait_until(lambda: self.line.add(_LEFT, 0) >= self.place.size, seconds=patience)

        ask_within(max(seconds, _LATE_SECONDS) + 1.0, leave)


def open_meeting(place: RankPlace, *, seconds: float) -> Meeting:
    """Connect to the store, or keep it; raises StoreGoneError if no process keeps it within `seconds`, or another run does."""
    where = f"the store at {place.address}:{place.port} in which the ranks meet"

    def try_to_connect() -> TCPStore | Exception:
        try:
            return _connect(place, port=place.port, keeps=place.keeps_store, seconds=seconds)
        except Exception as problem:
            return problem

    store = ask_within(seconds + 5.0, try_to_connect)
    if isinstance(store, StoreGoneError):
        raise store
    if isinstance(store, Exception):
        what = "keep" if place.keeps_store else "reach"
        raise StoreGoneError(
            f"rank {place.rank} cannot {what} {where} ({first_line(store)}); check MASTER_ADDR and MASTER_PORT, and that no "
            "other run uses that port"
        )
    # A restarted attempt must not read the keys of the one before.
    prefix = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    of_attempt = PrefixStore(prefix, store)
    if ask_within(seconds + 5.0, lambda: (of_attempt.add(_HERE, 1), of_attempt.add(f"{_HERE}/{place.rank}", 1))[1]) > 1:
        raise StoreGoneError(
            f"{where} already has a rank {place.rank}, so it belongs to another run; choose another MASTER_PORT for one of them"
        )
    # torch resolves names of addresses, which can take seconds
    opened_line, _ = _in_thread(
        lambda: cast(Store, PrefixStore(prefix, _connect(place, port=store.port, keeps=False, seconds=seconds)))
    )
    return Meeting(place, of_attempt, opened_line)


def _connect(place: RankPlace, *, port: int, keeps: bool, seconds: float) -> TCPStore:
    """Keep the store, or connect to it; retries if it vanishes meanwhile, since rank 0 may have failed and left."""
    if keeps:
        return _store(place, port=port, keeps=True, seconds=max(1.0, seconds))
    deadline, was_there = time.monotonic() + seconds, False
    while True:
        left = max(0.0, deadline - time.monotonic())
        _wait_for_port(place, port=port, seconds=min(left, _RETURN_SECONDS) if was_there else left)
        was_there = True
        try:
            store = _store(place, port=port, keeps=False, seconds=min(max(1.0, left), _CONNECT_SECONDS))
            store.set_timeout(timedelta(seconds=max(1.0, seconds)))
            return store
        except RuntimeError:
            if time.monotonic() > deadline:
                raise


def _store(place: RankPlace, *, port: int, keeps: bool, seconds: float) -> TCPStore:
    timeout, shares = timedelta(seconds=seconds), not place.launcher_keeps_store
    return TCPStore(place.address, port, place.size, keeps, timeout, wait_for_workers=False, multi_tenant=shares)


def _wait_for_port(place: RankPlace, *, port: int, seconds: float) -> None:
    """Wait until a process listens on the port; torch would also wait, but with C++ stacks in its errors."""
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((place.address, port), timeout=max(1.0, min(seconds, 5.0))).close()
            return
        except OSError as problem:
            patience = min(seconds, _NAME_SECONDS) if isinstance(problem, socket.gaierror) else seconds
            if time.monotonic() - start > patience:
                keeper = "torchrun on the first node" if place.launcher_keeps_store else "rank 0"
                raise StoreGoneError(
                    f"rank {place.rank} waited {patience:.0f} s for {keeper} at {place.address}:{port} (MASTER_ADDR and "
                    f"MASTER_PORT), which does not answer ({problem.strerror or problem}); was it started, and how did it end?"
                ) from None
            time.sleep(POLL_SECONDS)


def wait_until(question: Callable[[], _Result], *, seconds: float, pause_seconds: float = POLL_SECONDS) -> _Result:
    """Ask until the answer is true, or `seconds` have passed; returns the last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
    return answer


def ask_within(seconds: float, question: Callable[[], _Result]) -> _Result:
    """Return the store's answer to a request; raises StoreGoneError if there is none in time, or the connection is lost."""
    (answer, thread), num_ticks = _in_thread(question), max(1, math.ceil(seconds))
    for _ in range(num_ticks):  # instead of one wait, which would be over at once after this process itself was frozen
        thread.join(seconds / num_ticks)
    if not answer.done():
        raise StoreGoneError("the store in which the ranks meet does not answer")
    if (problem := answer.exception()) and type(problem).__name__ in ("DistNetworkError", "DistStoreError"):
        raise StoreGoneError(f"the connection to the store in which the ranks meet is lost ({first_line(problem)})")
    return answer.result()


def _in_thread(question: Callable[[], _Result]) -> tuple[Future[_Result], Thread]:
    """Ask in a thread of its own, which ends with the process at the latest."""
    answer: Future[_Result] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as problem:
            answer.set_exception(problem)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    return answer, thread


class StoreWatch:
    """Notices a store that answers nobody, as its process is frozen: one thread repeats requests, another one runs `watch`."""

    def __init__(self, patience_seconds: float, *, stopped: Event, end: Callable[[float], object]) -> None:
        """end: called with the seconds waited when no answer has come for longer than patience_seconds."""
        self._patience_seconds, self._stopped, self._end = patience_seconds, stopped, end
        self._num_answers = 0

    def note_answer(self) -> None:
        """Count an answer."""
        self._num_answers += 1

    def watch(self) -> None:
        """Watch until stopped, counting ticks instead of reading a clock, which continues while this process itself is frozen."""
        seen, silent_seconds = -1, 0.0
        while not self._stopped.wait(1.0):
            silent_seconds = 0.0 if self._num_answers != seen else silent_seconds + 1.0
            seen = self._num_answers
            if silent_seconds > self._patience_seconds:
                self._end(silent_seconds)
                return
