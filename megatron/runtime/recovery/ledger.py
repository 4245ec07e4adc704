"""Messages between the supervisors, the ranks and the keeper of an elastic run, in a store outside of all ranks.

Every sender appends its events to one list, which only the keeper reads; it answers by verdicts (the members of a generation of
the run) and by signals to the ranks of a generation.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

CUT, JOIN, OVER = "cut", "join", "over"
"""Signals to a generation: leave at once, as ranks are lost; leave after the step, as nodes join; the run is over."""
FLAGS = "recovery/flag"
"""Key of the flags in the store."""
_CONNECT_SECONDS = 60.0
_LOOK_SECONDS = 0.01


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

    def __init__(self, store: Store) -> None:
        self.store = store

    def tell(self, kind: str, **values: Any) -> None:
        """Append an event."""
        index = self.store.add("events", 1) - 1
        self.store.set(f"event/{index}", json.dumps({"kind": kind, **values}))

    def next_event(self, index: int, *, seconds: float) -> dict[str, Any] | None:
        """Wait a limited time for event `index`; None if it does not come."""
        key, deadline = f"event/{index}", time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)
        found: dict[str, Any] = json.loads(self.store.get(key))
        return found

    def signal(self, generation: int, index: int, what: str) -> None:
        """Send signal `index` (from 0) to a generation."""
        self.store.set(f"signal/{generation}/{index}", json.dumps(what))

    def next_signal(self, generation: int, index: int, *, seconds: float) -> str | None:
        """Wait for signal `index`; None if it does not come in time."""
        found: str | None = self._get(f"signal/{generation}/{index}", seconds)
        return found

    def publish(self, verdict: Verdict) -> None:
        """Publish the members of a generation."""
        self.store.set(f"verdict/{verdict.generation}", json.dumps(asdict(verdict)))

    def verdict(self, generation: int, *, seconds: float) -> Verdict | None:
        """Wait for the verdict on a generation; None if it does not come in time."""
        found: dict[str, Any] | None = self._get(f"verdict/{generation}", seconds)
        if found is None:
            return None
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        return Verdict(**values)

    def _get(self, key: str, seconds: float) -> Any:
        with suppress(DistStoreError):
            self.store.wait([key], timedelta(seconds=seconds))
            return json.loads(self.store.get(key))
        return None

    def set_flag(self, name: str, value: str = "1") -> None:
        """Set a flag for any reader."""
        self.store.set(f"flag/{name}", value)

    def count(self, name: str, *, by: int = 1) -> int:
        """Add to a counter and return it."""
        return int(self.store.add(f"count/{name}", by))

    def first_to_say(self, name: str, value: str) -> str:
        """Set a flag unless it is set, and return its value."""
        return str(self.store.compare_set(f"flag/{name}", "", value).decode())

    def flag(self, name: str) -> str | None:
        """Return a flag's value; None if it is not set."""
        key = f"flag/{name}"
        return self.store.get(key).decode() if self.store.check([key]) else None


def connect(address: str, port: int, *, keeps: bool = False, seconds: float = _CONNECT_SECONDS) -> TCPStore:
    """Connect to the store, or keep it."""
    timeout = timedelta(seconds=seconds)
    return TCPStore(address, port, None, keeps, timeout, wait_for_workers=False)


def open_ledger(address: str, port: int, *, seconds: float = _CONNECT_SECONDS) -> Ledger:
    """Connect to the store, and return a ledger."""
    return Ledger(PrefixStore("recovery", connect(address, port, seconds=seconds)))
