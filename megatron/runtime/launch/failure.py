"""Ends a run: a failed one with one clear message and no rank left waiting, another when it is asked to stop.

Requests to stop are SIGTERM, SIGUSR1 (a cluster's time limit or preemption), Ctrl-C and --exit-duration-in-mins. During training
they let all ranks finish the step, save, and end normally; at other times signals end the process at once. A thread takes the
signals, as the main thread may wait inside a collective, where Python handles none.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron.runtime.launch.rank_place import RankPlace, StoreGoneError, find_rank_place
from multimodal.values.errors import BraidError, ConfigError, first_line
from multimodal.values.plan import MOST_RANKS

if TYPE_CHECKING:  # a wrong flag ends the run before torch needs to be imported
    from megatron.runtime.launch.meeting import Meeting


PROGRAM = "pretrain_mllm.py"
_EARLY_SECONDS = 15.0
"""Seconds for which a rank that fails before the meeting looks for the others, and rank 0 informs them."""
_REPORT_SECONDS = 8.0
"""Seconds for which other ranks wait for the message of the one that failed first."""
_LEAVE_SECONDS, _ROLL_CALL_SECONDS = 4.0, 2.5
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Socket closed"),
    "Transport endpoint is not connected",
)
"""Parts of torch.distributed's messages that show that another rank is gone."""
_WAITED_IN_VAIN = ("Timed out waiting", "wait timeout after", "timed out after", "Socket Timeout")
"""Parts of messages that show that another rank did not come."""
_FOLLOWED = "ended because another rank failed"
FAULTS = "frozen, killed, out of memory, or its node failed? See how its log ends, and the kernel's log (dmesg) of its node"


class RanksLostError(RuntimeError):
    """Other ranks are gone, or do not come; the message names them and what to check."""


class InterruptedRunError(Exception):
    """A signal asks the process to end at once."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Ending:
    """The end of this process when something fails in any of its threads."""

    def __init__(self) -> None:
        self.meeting: Meeting | None = None
        """Set once the ranks have met."""
        self.spares_others = False
        """True in an elastic run: a failure of one process ends only that process."""
        self._lock = threading.Lock()

    def fail(self, problem: BaseException) -> NoReturn:
        """Report and exit at once with code 1 (2 for bad input), without cleaning up, which could wait for peers.

        For wrong input only the message is shown, otherwise the traceback. Only the rank that fails first reports; all others are
        informed and end with the same exit code. A second thread that calls this waits here for the end of the process.
        """
        self._lock.acquire()
        if self.spares_others and not isinstance(problem, (BraidError, InterruptedRunError)):
            report(problem, _place_or_guess().rank)
            end_process(1)
        exit_code = problem.exit_code if isinstance(problem, InterruptedRunError) else 2 if isinstance(problem, BraidError) else 1
        tell_launcher(_FOLLOWED, seconds_later=1)
        try:
            if self.meeting is not None:
                exit_code = _fail(problem, exit_code, self.meeting)
            else:
                exit_code = _fail_before_meeting(problem, exit_code)
        except Exception:  # ending must not fail
            traceback.print_exc()
        end_process(exit_code)

    def follow(self, exit_code: int) -> NoReturn:
        """Exit because another rank failed and has reported it."""
        self._lock.acquire()
        tell_launcher(_FOLLOWED, seconds_later=1)
        _leave(self.meeting)
        end_process(exit_code)


def end_process(exit_code: int) -> NoReturn:
    """Exit at once, together with the loader processes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a closed pipe
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def _fail_before_meeting(problem: BaseException, exit_code: int) -> int:
    """Fail before the meeting: if all ranks see the same wrong flags, rank 0 reports them; a single rank finds the others."""
    place = _place_or_guess()
    has_no_store = isinstance(problem, StoreGoneError)
    if place.rank == 0 or has_no_store:
        report(problem, place.rank)
    if place.size == 1 or has_no_store or isinstance(problem, InterruptedRunError):
        return exit_code
    sys.stderr.flush()
    try:
        from megatron.runtime.launch.meeting import ask_within, open_meeting, wait_until

        meeting = open_meeting(place, seconds=_EARLY_SECONDS)
        meeting.wait_for_line()
        if place.rank != 0:
            wait_until(lambda: ask_within(3.0, meeting.knows_of_first), seconds=_EARLY_SECONDS)
            return _fail(problem, exit_code, meeting)
        meeting.claim_failure()
        meeting.announce_failure(exit_code)
        meeting.leave(seconds=_EARLY_SECONDS)
    except (RuntimeError, ImportError):  # no other rank is there
        if place.rank != 0:
            report(problem, place.rank)
    return exit_code


def _place_or_guess() -> RankPlace:
    """Return the place of this rank, which finds the others even if its environment has a wrong number of processes."""
    enlarged = {**os.environ, "WORLD_SIZE": str(MOST_RANKS)}
    has_launcher = "WORLD_SIZE" in os.environ  # else nobody has made a place to meet
    for environ in (os.environ, enlarged) if has_launcher else (os.environ,):
        with suppress(ConfigError):
            return find_rank_place(environ)
    return RankPlace(0, 1, 0, "", 0, launcher_keeps_store=False)


def _fail(problem: BaseException, exit_code: int, meeting: "Meeting") -> int:
    """Report the failure if it is the run's first, and inform all; returns the exit code of the rank that failed first."""
    try:
        if meeting.claim_failure():
            report(explain_lost_ranks(problem, meeting), meeting.place.rank)
            meeting.announce_failure(exit_code)
        elif (first := meeting.wait_for_failure(seconds=_REPORT_SECONDS)) is not None:
            exit_code = first
        else:  # it died before it could report
            report(problem, meeting.place.rank)
    except StoreGoneError:
        rank = meeting.place.rank
        if _says(problem, (*_LOST_PEER, *_WAITED_IN_VAIN)):
            where = f"{store_keeper(meeting.place)} {FAULTS}"
            problem = RanksLostError(f"rank {rank} lost its connection to {where} ({first_line(problem)[:200]})")
        report(problem, rank)
        return exit_code
    _leave(meeting)
    return exit_code


def _leave(meeting: "Meeting | None") -> None:
    if meeting is not None:
        with suppress(RuntimeError):  # the store's process may be gone
            meeting.leave(seconds=_LEAVE_SECONDS)


def explain_lost_ranks(problem: BaseException, meeting: "Meeting") -> BaseException:
    """Turn torch's error about a lost rank, or loader process, into one that names it; other errors are returned unchanged."""
    is_lost, is_late = _says(problem, _LOST_PEER), _says(problem, _WAITED_IN_VAIN)
    rank, reason = meeting.place.rank, first_line(problem)[:200]
    if _says(problem, ("DataLoader worker (pid",)):
        fix = "if memory is short, lower --num-workers; if data changed meanwhile, restore them; then resume"
        return RanksLostError(f"rank {rank} lost a process that loads its data: {FAULTS}; {fix} ({reason})")
    if not is_lost and not is_late:
        return problem
    answers = meeting.call_roll(seconds=_ROLL_CALL_SECONDS)
    missing = [other for other in range(meeting.place.size) if other != rank and other not in answers]
    if missing:
        happened = "lost its connection to" if is_lost else "waited longer than --distributed-timeout-minutes for"
        silent = f"{shown_ranks(missing)}, which no longer answer{'s' * (len(missing) == 1)}"
        return RanksLostError(f"rank {rank} {happened} {silent}: {FAULTS} ({reason})")
    if is_lost:
        return RanksLostError(
            f"rank {rank} lost its connection to another rank, though all of them run: look at the network ({reason})"
        )
    doing = "".join(f"\n  rank {other}: {what}" for other, what in answers.items())
    return RanksLostError(
        f"rank {rank} waited longer than --distributed-timeout-minutes, though all ranks run. If something that all wait for "
        f"takes so long, raise it; else the ranks wait for each other, which is a fault in Braid: please report it with all that "
        f"follows ({reason})\n  rank {rank}: {_shown_stack(traceback.extract_tb(problem.__traceback__))}{doing}"
    )


def store_keeper(place: RankPlace) -> str:
    """Return the process that keeps the store, for messages about a store that does not answer."""
    where = f"the store at {place.address}:{place.port}"
    if place.launcher_keeps_store:
        return f"other ranks, and {where}, which torchrun keeps on the first node, does not answer:"
    return f"rank 0, as {where}, which rank 0 keeps, does not answer:"


def tell_launcher(message: str, *, seconds_later: int = 0) -> None:
    """Have torchrun's own report end in a message instead of a reference to its documentation; the earliest is its root cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        found = {"py_callstack": message, "timestamp": str(int(time.time()) + seconds_later)}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": found}}))


def report(problem: BaseException, rank: int) -> None:
    """Report to the user: a message if there is one, else a traceback."""
    tell_launcher(f"{type(problem).__name__}: {problem}")
    if isinstance(problem, BraidError):
        print(f"{PROGRAM}: error: {problem} [{type(problem).__name__}, rank {rank}]", file=sys.stderr)
    elif isinstance(problem, (RanksLostError, StoreGoneError, InterruptedRunError)):
        print(f"{PROGRAM}: {'' if isinstance(problem, InterruptedRunError) else 'error: '}{problem}", file=sys.stderr)
    else:
        print(f"{PROGRAM}: rank {rank} failed:", file=sys.stderr)
        traceback.print_exception(problem)
    sys.stdout.flush()
    sys.stderr.flush()


def shown_place_of_main_thread() -> str:
    """Return the main thread's stack, innermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _shown_stack(traceback.extract_stack(frame)) if frame is not None else "has ended"


def _shown_stack(stack: traceback.StackSummary) -> str:
    folders = [f"{os.sep}{part}{os.sep}" for part in ("runtime", "multimodal")]
    own = (call for call in stack if any(each in call.filename for each in folders) and "site-packages" not in call.filename)
    calls = [f"{os.path.basename(call.filename)}:{call.lineno} {call.name}" for call in own]
    return " < ".join(reversed(calls[-6:])) or "outside of Braid"


def is_of_lost_ranks(problem: BaseException) -> bool:
    """Return True if lost or missing ranks may have caused the error."""
    return _says(problem, (*_LOST_PEER, *_WAITED_IN_VAIN)) or type(problem).__name__ in ("DistNetworkError", "DistStoreError")


def _says(problem: BaseException, signs: tuple[str, ...]) -> bool:
    return isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in signs)


def shown_ranks(ranks: list[int]) -> str:
    """Return the first ranks of a list in words."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


_SAME_SIGNAL_SECONDS = 3.0
"""srun and torchrun both send SIGTERM to the same rank; a signal that follows this soon is not a second request."""


class StopReason(IntEnum):
    """Reasons to stop a run before its last step; if ranks have several, all take the largest."""

    NONE = 0
    JOIN = 1
    """Only to continue with nodes that have joined an elastic run."""
    DURATION = 2
    SIGUSR1 = 3
    SIGTERM = 4

    def describe(self) -> str:
        """Return the cause of the stop in words."""
        return "--exit-duration-in-mins" if self is StopReason.DURATION else self.name


_ASKING = {signal.SIGTERM: StopReason.SIGTERM, signal.SIGUSR1: StopReason.SIGUSR1}
_TAKEN = (*_ASKING, signal.SIGINT)


class StopRequests:
    """This process's signals, and the time since it began."""

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._start_seconds = time.monotonic()
        self.is_training = False
        """True once there is a state to save: then stop after a step."""
        self._else = "before training"
        self._asked_seconds: float | None = None
        self._asked_by = StopReason.NONE

    def listen(self) -> None:
        """Take SIGTERM, SIGUSR1 and SIGINT from now on; in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _TAKEN:
            signal.signal(number, lambda number, frame: None)  # for the signal to be written to the thread's pipe
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

    def reason(self, *, exit_duration_minutes: float | None) -> StopReason:
        """Return this rank's reason to stop after the current step."""
        if self._asked_by:
            return self._asked_by
        seconds = time.monotonic() - self._start_seconds
        return StopReason.DURATION if exit_duration_minutes and seconds >= 60 * exit_duration_minutes else StopReason.NONE

    def wait_for_nodes(self) -> None:
        """End at once when asked from now on, or before: an elastic run that lacks nodes has no step after which to stop."""
        self.is_training, self._else = False, "while it waited for nodes"
        if self._asked_by:
            self.take(signal.Signals[self._asked_by.name])

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number in _TAKEN:  # other signals have their own handlers
                    self.take(signal.Signals(number))

    def take(self, number: signal.Signals) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if number in _ASKING and self.is_training:
            if self._asked_seconds is None:
                self._asked_by, self._asked_seconds = _ASKING[number], now
                return
            if now - self._asked_seconds < _SAME_SIGNAL_SECONDS:
                return
        when = "while training" if self.is_training else self._else
        self._ending.fail(InterruptedRunError(f"ended by {number.name} {when}", exit_code=128 + number))


def ignore_in_worker() -> None:
    """Ignore signals in a forked loader process, which its training process ends."""
    signal.set_wakeup_fd(-1)
    for number in _TAKEN:  # a launcher may send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
