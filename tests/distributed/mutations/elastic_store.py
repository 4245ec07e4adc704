"""Mutations of an elastic run: a stranger at the port of its store, through which nodes come and go."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron.runtime.recovery.ledger import Ledger, connect
from tests.distributed.mutations.mutation import Inputs, Mutation, short

Talk = Callable[[int], object]
"""Acts of a stranger who knows the store's port."""
NOISE: dict[str, bytes] = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
    "zeros": b"\0" * 4096,
    "ones": b"\xff" * 4096,
    "a pickle": b"\x80\x04cos\nabort\n(tR.",
    "torch's greeting, cut off": (0x3C85F7CE).to_bytes(4, "little")[:3],
    "torch's greeting, then noise": (0x3C85F7CE).to_bytes(4, "little") + bytes(range(256)) * 4,
    "a key that is never sent whole": (0x3C85F7CE).to_bytes(4, "little") + b"\0" + (2**40).to_bytes(8, "little") + b"key",
}
VALUES: dict[str, str] = {
    "nothing": "",
    "no JSON": "{no JSON",
    "JSON nested deep": "[" * 10**5,
    "a seal of zeros": "0" * 64 + '{"kind": "finished", "exit_code": 0}',
    "a long text": "x" * 10**6,
}
KEYS = ("event/0", "verdict/2", "signal/1/0", "flag/failed", "flag/over", "flag/start", "flag/patience", "flag/kill/0/0")
NUM_PEERS, NUM_EVENTS = 200, 500


def elastic_mutations() -> Iterator[Mutation]:
    """Send noise to the store, hold connections open, and write what a stranger makes up, or has read, under the run's keys."""
    talks: dict[str, Talk] = {}
    for name, noise in NOISE.items():
        talks[f"sends {name}"] = partial(send, noise=noise, num_peers=1)
        talks[f"{NUM_PEERS} connections that send {name}"] = partial(send, noise=noise, num_peers=NUM_PEERS)
    for key in KEYS:
        for name, value in VALUES.items():
            talks[f"writes {name} at {key}"] = partial(_write, key=key, value=value)
        talks[f"repeats another value at {key}"] = partial(_repeat, key=key)
    for kind in ("started", "died", "trouble", "arrived", "finished", "left", "unknown"):
        talks[f"says {kind} without the token"] = partial(_tell, kind=kind)
    for name, value in VALUES.items():
        talks[f"writes {NUM_EVENTS} events: {name}"] = partial(_flood, value=value)
    for name, talk in talks.items():
        yield Mutation(f"elastic: {short(name) if len(name) > 80 else name}", partial(_meet, talk=talk), must_train=True)


def _meet(inputs: Inputs, *, talk: Talk) -> None:
    inputs.stranger = talk


def send(port: int, *, noise: bytes, num_peers: int) -> list[socket.socket]:
    """Connect and send; returns the connections, which stay open as long as they are kept."""
    peers = []
    for _ in range(num_peers):
        with suppress(OSError):
            peers.append(peer := socket.create_connection(("127.0.0.1", port), timeout=20))
            peer.sendall(noise)
    return peers


def _write(port: int, *, key: str, value: str) -> None:
    _open(port).set(f"recovery/{key}", value)


def _repeat(port: int, *, key: str) -> None:
    store = _open(port)
    told = "recovery/verdict/1" if key == "event/0" else "recovery/event/0"
    store.wait([told], timedelta(seconds=60))
    store.set(f"recovery/{key}", store.get(told).decode())


def _tell(port: int, *, kind: str) -> None:
    Ledger(_open(port), b"a stranger's guess").tell(kind, node=0, incarnation=0, exit_code=0)


def _flood(port: int, *, value: str) -> None:
    store = _open(port)
    for _ in range(NUM_EVENTS):
        store.set(f"recovery/event/{store.add('recovery/events', 1) - 1}", value[:1000] or json.dumps({}))


def _open(port: int) -> Store:
    return connect("127.0.0.1", port)
