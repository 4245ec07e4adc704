"""Ranks start only when all of them were told the same: before any process group exists, or a difference would be a hang."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping

from megatron.runtime.launch.failure import RanksLostError
from megatron.runtime.launch.meeting import POLL_SECONDS, Meeting
from multimodal.values.errors import ConfigError

StartValues = Mapping[str, Mapping[str, str]]
"""Section -> name -> value, in the order in which differences are looked for."""

_ADVICE: Mapping[str, str] = {
    "program": "rank {rank} runs with {name} {there}, rank 0 with {here}; install the same on every node",
    "flags": "rank {rank} was started {there}, rank 0 {here}; start every rank with the same flags",
    "environment": "rank {rank} has {name} {there} in its environment, rank 0 {here}; start every rank by the same launcher",
    "model": "rank {rank} has another model, whose {name} is {there}, rank 0's {here}; give every rank the same --model",
    "plan": "rank {rank} has another plan, whose {name} is {there}, rank 0's {here}; give every rank the same --plan",
    "tokenizer": "rank {rank} has another tokenizer: {name} is {there}, rank 0's {here}; give all the same --tokenizer-model",
    "data": "rank {rank} sees other data: {name} is {there}, on rank 0 {here}; give --data-path the same content on every node",
    "costs": "rank {rank} has other costs: {name} is {there}, on rank 0 {here}; give every rank the same --emulate and --cluster",
}
"""What to say of a difference, by section."""
_ABSENT = "missing"
_VERDICT = "start"
_AGREED = "agreed"
_LEARN_SECONDS = 15.0


def digest_of(values: StartValues) -> str:
    """A text that two ranks share if, with near certainty, all their values are the same."""
    digest = hashlib.blake2b(digest_size=16)
    for section, entries in values.items():
        for name, value in entries.items():
            digest.update(f"{section}\0{name}\0{value}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def describe_difference(here: StartValues, *, there: StartValues, rank: int) -> str:
    """Say what is different first, and what to do; here: of rank 0, there: of `rank`. Empty when nothing is."""
    for section, advice in _ADVICE.items():
        first, other = here.get(section, {}), there.get(section, {})
        for name in dict.fromkeys((*first, *other)):
            if first.get(name, _ABSENT) != other.get(name, _ABSENT):
                shown = [entries.get(name, _ABSENT) for entries in (other, first)]
                return advice.format(rank=rank, name=name, there=shown[0], here=shown[1])
    return ""


def agree_on_start(meeting: Meeting, values: StartValues, *, timeout_seconds: float) -> None:
    """Wait until all ranks have brought the values of rank 0.

    Rank 0 compares digests as they come; at the first that differs it shows its values, and the rank that brought it says what is
    different: O(ranks) small messages. Raises ConfigError on the rank that differs, RanksLostError when ranks do not come.
    """
    deadline = time.monotonic() + timeout_seconds
    place, store = meeting.place, meeting.store
    store.set(f"{_VERDICT}/{place.rank}", digest_of(values))
    if place.rank == 0:
        _compare_all(meeting, values, deadline)
        return
    _wait(meeting, _VERDICT, deadline, missing=lambda: f"rank {place.rank} waited in vain for others to start")
    verdict = store.get(_VERDICT).decode()
    if verdict == _AGREED:
        return
    told = json.loads(verdict)
    if told["rank"] == place.rank:
        raise ConfigError(describe_difference(told["values"], there=values, rank=place.rank))
    _wait_for_end(meeting, deadline, rank=told["rank"])


def _compare_all(meeting: Meeting, values: StartValues, deadline: float) -> None:
    store, own = meeting.store, digest_of(values)
    waiting = list(range(1, meeting.place.size))

    def missing() -> str:
        shown = ", ".join(map(str, waiting[:8])) + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
        return f"rank 0 waited in vain for rank{'s' * (len(waiting) > 1)} {shown} to start"

    while waiting:
        _wait(meeting, f"{_VERDICT}/{waiting[0]}", deadline, missing=missing)
        rank = waiting.pop(0)
        if store.get(f"{_VERDICT}/{rank}").decode() != own:
            store.set(_VERDICT, json.dumps({"rank": rank, "values": values}))
            _wait_for_end(meeting, deadline, rank=rank)
    store.set(_VERDICT, _AGREED)


def _wait_for_end(meeting: Meeting, deadline: float, *, rank: int) -> None:
    """The rank that differs ends the run, as soon as it has learnt of it."""
    deadline = min(deadline, time.monotonic() + _LEARN_SECONDS)
    _wait(meeting, "never", deadline, missing=lambda: f"rank {rank} was started with other values than rank 0")


def _wait(meeting: Meeting, key: str, deadline: float, *, missing: Callable[[], str]) -> None:
    """Look until it is there, or another rank has failed."""
    while not meeting.store.check([key]):
        if meeting.failure(meeting.store) is not None:
            raise RanksLostError("another rank failed while the ranks met")
        if time.monotonic() > deadline:
            raise RanksLostError(
                f"{missing()} (--distributed-timeout-minutes); see whether all were started, and how the log of each ends"
            )
        time.sleep(POLL_SECONDS)
