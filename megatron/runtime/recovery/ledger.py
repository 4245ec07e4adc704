"""Messages between the supervisors, the ranks and the keeper of an elastic run, in a store outside of all ranks.

Every sender appends its events to one list, which only the keeper reads; it answers by verdicts (the members of a generation of
the run) and by signals to the ranks of a generation.
"""

import ipaddress
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from megatron.runtime.launch.meeting import wait_until
from megatron.runtime.recovery.sealed_store import SealedStore
from multimodal.values.errors import ConfigError

logger = logging.getLogger(__name__)
CUT, JOIN, OVER = "cut", "join", "over"
"""Signals to a generation: leave at once, as ranks are lost; leave after the step, as nodes join; the run is over."""
FLAGS = "recovery/flag"
"""Key of the flags in the store."""
PATIENCE = "patience"
"""Flag with --elastic-timeout, the seconds for which ranks and supervisors wait for the store to answer."""
_CONNECT_SECONDS = 60.0
_LOOK_SECONDS = 0.01
_LATE_SECONDS = 1.0
"""Seconds between taking an event's number and writing it after which its sender is considered dead."""
_MOST_PASSED_OVER = 64
_BACKLOG = 4096
"""Connections that may wait: every rank opens several at once."""


class Identity(NamedTuple):
    """A rank's process, which keeps its identity while its rank may change."""

    node: int
    incarnation: int
    """Number of times that the node's processes have been started, from 0."""
    local_rank: int

    @property
    def name(self) -> str:
        """The identity as a key."""
        return f"{self.node}/{self.incarnation}/{self.local_rank}"


@dataclass(frozen=True)
class Report:
    """The state that a rank reports when it arrives for the next generation."""

    done_steps: int | None = None
    """Number of steps in its weights; None: it has none of the run's weights."""
    outcome: Mapping[str, Any] | None = None
    """Results of the last of these steps, with which others can finish it."""
    formed: int = 0
    """Generation whose plan determines the part of the state that it has."""
    pipelines: tuple[Any, ...] = ()
    """The replicas of that plan."""
    waits: bool = False
    """True if there were too few nodes for a plan."""
    is_spare: bool = False
    """True if the plan had no place for it."""
    timeout_seconds: float = 30.0
    """--elastic-timeout."""


@dataclass(frozen=True)
class Verdict:
    """The members of a generation, and the state that they start from."""

    generation: int
    nodes: tuple[int, ...] = ()
    """Nodes in the order of their ranks: those that were there before, then those that join."""
    incarnations: tuple[int, ...] = ()
    holding: tuple[int, ...] = ()
    """Nodes whose ranks have a part of the run's state."""
    done_steps: int | None = None
    """The largest number of steps that any of them has done; None: no node has a state."""
    outcome: Mapping[str, Any] | None = None
    pipelines: tuple[Any, ...] = ()
    exit_code: int | None = None
    """Set when the run is over."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Times (of the keeper's clock) at which the keeper learnt of a loss, and decided."""


class Ledger:
    """One connection to the store; each thread that waits needs its own."""

    def __init__(self, store: Store, token: bytes) -> None:
        self.store = SealedStore(store, token, "recovery")
        self._next_event = 0
        self._missing_since: float | None = None
        self._passed_over: deque[int] = deque(maxlen=_MOST_PASSED_OVER)
        """Numbers of events that were not there in their turn, or forged."""

    def tell(self, kind: str, **values: Any) -> None:
        """Append an event."""
        index = self.store.add("events", 1) - 1
        self.store.set(f"event/{index}", json.dumps({"kind": kind, **values}))

    def next_event(self, *, seconds: float) -> dict[str, Any] | None:
        """Wait a limited time for the next event that this ledger has not returned; None if none comes."""
        told = wait_until(self._look_for_event, seconds=seconds, pause_seconds=_LOOK_SECONDS)
        return None if told is None else dict(json.loads(told))

    def _look_for_event(self) -> bytes | None:
        """Return an event that is there. One whose sender died, or that is forged, is passed over and looked for later."""
        for index in tuple(self._passed_over):
            if (told := self.store.find(f"event/{index}")) is not None:
                self._passed_over.remove(index)
                return told
        while self.store.add("events", 0) > self._next_event:
            key, now = f"event/{self._next_event}", time.monotonic()
            self._missing_since = now if self._missing_since is None else self._missing_since
            if (told := self.store.find(key)) is None:
                if not self.store.is_written(key) and now - self._missing_since < _LATE_SECONDS:
                    return None
                self._passed_over.append(self._next_event)
            self._next_event, self._missing_since = self._next_event + 1, None
            if told is not None:
                return told
        return None

    def signal(self, generation: int, index: int, what: str) -> None:
        """Send signal `index` (from 0) to a generation."""
        self.store.set(f"signal/{generation}/{index}", json.dumps(what))

    def next_signal(self, generation: int, index: int, *, seconds: float) -> str | None:
        """Wait for signal `index`; None if it does not come in time."""
        signal = self._get(f"signal/{generation}/{index}", seconds)
        return None if signal is None else str(signal)

    def publish(self, verdict: Verdict) -> None:
        """Publish the members of a generation."""
        self.store.set(f"verdict/{verdict.generation}", json.dumps(asdict(verdict)))

    def verdict(self, generation: int, *, seconds: float) -> Verdict | None:
        """Wait for the verdict on a generation; None if it does not come in time."""
        plain = self._get(f"verdict/{generation}", seconds)
        if plain is None:
            return None
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        return Verdict(**values)

    def _get(self, key: str, seconds: float) -> Any:
        with suppress(DistStoreError):
            self.store.wait([key], timedelta(seconds=seconds))
            if (found := self.store.find(key)) is not None:
                return json.loads(found)
            time.sleep(min(seconds, _LATE_SECONDS))  # forged; the right one may follow
        return None

    def set_flag(self, name: str, value: str = "1") -> None:
        """Set a flag for any reader."""
        self.store.set(f"flag/{name}", value)

    def count(self, name: str, *, by: int = 1) -> int:
        """Add to a counter and return it."""
        return int(self.store.add(f"count/{name}", by))

    def first_to_say(self, name: str, value: str) -> str:
        """Set a flag unless it is set, and return its value."""
        return self.store.first_to_set(f"flag/{name}", value).decode()

    def flag(self, name: str) -> str | None:
        """Return a flag's value; None if it is not set."""
        found = self.store.find(f"flag/{name}")
        return None if found is None else found.decode()


def connect(address: str, port: int, *, seconds: float = _CONNECT_SECONDS) -> TCPStore:
    """Connect to the store."""
    return TCPStore(address, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)


def keep(address: str, port: int) -> TCPStore:
    """Keep the store, reachable at its address only; raises ConfigError."""
    try:
        listener = _listen(address, port)
    except OSError as problem:
        raise ConfigError(
            f"the store cannot listen at {address}:{port} ({problem.strerror or problem}); give --address, an address of this "
            "machine, and --port, a port that is free"
        ) from problem
    timeout = timedelta(seconds=_CONNECT_SECONDS)
    return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen(address: str, port: int) -> socket.socket:
    """Listen at an address; torch alone would at all of them."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    found = str(place[0])
    if ipaddress.ip_address(found).is_loopback and address not in (found, "localhost"):
        # The machine's own name, which other machines know by another address.
        logger.warning("%s is %s on this machine, which others do not reach: the store listens at all addresses", address, found)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        family, place = socket.AF_INET, ("", port)
    return socket.create_server(place[:2], family=family, backlog=_BACKLOG)


def open_ledger(address: str, port: int, token: bytes, *, seconds: float = _CONNECT_SECONDS) -> Ledger:
    """Connect to the store, and return a ledger."""
    return Ledger(connect(address, port, seconds=seconds), token)
