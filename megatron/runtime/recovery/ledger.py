"""Messages of an elastic run in a store outside of its ranks: events to the keeper, and its verdicts and signals."""

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from os import fsencode
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from megatron.runtime.launch.meeting import wait_until
from megatron.runtime.launch.rank_place import HOW, check_token, read_token
from multimodal.values.errors import ConfigError

TOKEN_VARIABLE = "BRAID_ELASTIC_TOKEN"
"""Environment variable with the token, as supervisors hand it to ranks."""
_SEAL_BYTES = 64
"""Bytes of a value before what it says: HMAC-SHA256, in hexadecimal digits."""


class SealedStore:
    """A store's keys below a prefix, whose values, but not counters, are sealed: a stranger's are as good as not there."""

    def __init__(self, store: Store, token: bytes, prefix: str) -> None:
        self._store, self._token, self._prefix = store, token, prefix
        self._has_warned = False

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self._store.set(self._name(key), self._seal(key, value))

    def find(self, key: str) -> bytes | None:
        """Return a value; None if it is not there, or forged."""
        return self._open(key, self._store.get(self._name(key))) if self.is_written(key) else None

    def get(self, key: str) -> bytes:
        """Return a value that is there; raises DistStoreError if it is not."""
        found = self.find(key)
        if found is None:
            raise DistStoreError(f"the store has no value of this run at {self._name(key)}")
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all of these values are there."""
        return all(self.find(key) is not None for key in keys)

    def is_written(self, key: str) -> bool:
        """Return True if anyone has written a value, forged or not."""
        return bool(self._store.check([self._name(key)]))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until anyone has written these values; raises DistStoreError after the timeout."""
        self._store.wait([self._name(key) for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._store.add(self._name(key), amount))

    def first_to_set(self, key: str, value: str) -> bytes:
        """Set a value unless it is there, and return what is there now."""
        sealed, expected = self._seal(key, value), b""
        while True:
            found = self._store.compare_set(self._name(key), expected, sealed)  # type: ignore[arg-type]  # it takes bytes, too
            told = self._open(key, found)
            if told is not None:
                return told
            expected = found  # forged: to be replaced

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _digest(self, key: str, said: bytes) -> bytes:
        return hmac.digest(self._token, self._name(key).encode() + b"\0" + said, "sha256").hex().encode()

    def _seal(self, key: str, value: str) -> str:
        return self._digest(key, value.encode()).decode() + value

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        seal, said = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if hmac.compare_digest(seal, self._digest(key, said)):
            return said
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ignored what the store has at %s, as it was written without the token of this run: by a supervisor with "
                "another --token, by another run, or by a stranger who reaches the store's port",
                self._name(key),
            )
        return None


def find_token(path: Path | None, environ: Mapping[str, str], *, makes_one: bool) -> bytes:
    """Return the token in a file, or else in the environment, or else, if this makes one, a new one; raises ConfigError."""
    if path is not None:
        return read_token(path, flag="--token")
    if TOKEN_VARIABLE in environ:
        return check_token(fsencode(environ[TOKEN_VARIABLE]), where=TOKEN_VARIABLE)
    if makes_one:
        return secrets.token_hex().encode()
    raise ConfigError(f"supervisors that share a store need a token that all of them know: --token FILE; {HOW}")


logger = logging.getLogger(__name__)
CUT, JOIN, OVER = "cut", "join", "over"
"""Signals to a generation: leave at once, as ranks are lost; leave after the step, as nodes join; the run is over."""
FLAGS = "recovery/flag"
"""Key of the flags in the store."""
PATIENCE = "patience"
"""Flag with --elastic-timeout: the seconds for which ranks and supervisors wait for the store, and the keeper for ranks."""
PATIENCE_SECONDS = 30.0
"""Seconds for which they wait before a rank has told that."""
_CONNECT_SECONDS, _LOOK_SECONDS = 60.0, 0.01
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
