"""Items that producers decode, as a rank's reading process sees them: asked for a step at a time, and taken as they come.

A producer that is gone, or silent for too long, is done without: what it still owed is asked of the others, and decoded here
where there are none. So every item comes once, whatever happens to producers; a producer that is back is used again.
"""

import json
import logging
import os
import socket
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.runtime.feed.producers.wire import (
    WireError,
    build_pixels,
    pack_wanted,
    parse_address,
    prove_token,
    receive_frame,
    send_frame,
)
from multimodal.data.index.item_reader import ItemReader, WantedItem
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph

SILENCE_SECONDS = 30.0
"""A producer that says nothing for so long is done without."""
ABSENCE_SECONDS = 30.0
"""A producer that was lost is looked for again after this time."""
logger = logging.getLogger(__name__)


def describe_data_set(graph: ModelGraph, data_path: str | Path) -> str:
    """Return all that a producer must know to decode a data set's items: the model's units, and where embedded images lie."""
    return json.dumps({"model": graph.to_dict(), "data_path": str(Path(data_path).absolute())})


class ProducedItems:
    """An `ItemDecoder` whose items come from producers."""

    def __init__(self, addresses: Sequence[str], *, token: bytes, data_set: str, local: ItemReader) -> None:
        """local: decodes what no producer does."""
        self._addresses = {address: parse_address(address) for address in addresses}
        self._token, self._data_set, self._local = token, data_set, local
        self._forget_connections()

    def check(self) -> None:
        """Raise ConfigError unless every producer is there, knows the token and finds the data set."""
        for address in self._addresses:
            try:
                self._connect(address).close()
            except (WireError, OSError) as problem:
                raise ConfigError(
                    f"--producers {address}: {problem}; start it with python tools/producer.py --listen {address} --token FILE, "
                    "with the run's token, where it finds the same files, or leave it out"
                ) from problem

    def expect(self, wanted: Sequence[WantedItem]) -> None:
        """Ask producers for all of these now; O(items)."""
        if self._process != os.getpid():
            self._forget_connections()  # a forked process reads from connections of its own
        while self._asked:  # still owed, and not wanted any more
            self._receive(next(iter(self._asked)))
        self._arrived.clear()
        self._look_for_producers()
        self._ask(dict.fromkeys(wanted), of=[each for each in self._addresses if each in self._connections])

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Take one item, waiting until it comes; raises DataError when it cannot be decoded."""
        if self._process != os.getpid() or not self._is_expected(wanted):
            self.expect([wanted])
        while wanted not in self._arrived:
            address = next((each for each, items in self._asked.items() if wanted in items), None)
            if address is not None:
                self._receive(address)
            elif idle := [each for each in self._connections if each not in self._asked]:
                self._ask(self._unasked, of=idle)
            elif self._asked:
                self._receive(next(iter(self._asked)))
            else:
                return self._local.read(wanted)
        found = self._arrived[wanted]
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        self._connections: dict[str, socket.socket] = {}
        self._lost_at: dict[str, float] = {}
        self._asked: dict[str, deque[WantedItem]] = {}
        """Producer -> what it still owes, in order."""
        self._unasked: tuple[WantedItem, ...] = ()
        """What lost producers owed, or what there was no producer for."""
        self._arrived: dict[WantedItem, ItemPixels | str] = {}
        """Items, or why they cannot be decoded."""

    def _is_expected(self, wanted: WantedItem) -> bool:
        return wanted in self._arrived or wanted in self._unasked or any(wanted in items for items in self._asked.values())

    def _ask(self, wanted: Iterable[WantedItem], *, of: Sequence[str]) -> None:
        """Ask idle producers. Those that still send are not asked for more: both sides might wait for the other to read."""
        self._unasked = () if of else (*wanted,)
        shares: dict[str, list[WantedItem]] = {address: [] for address in of}
        for each in wanted if of else ():
            # Ranks that want the same item ask the same producer, which decodes it once.
            shares[of[zlib.crc32(f"{each.item.path} {each.item.tile}".encode()) % len(of)]].append(each)
        for address, items in shares.items():
            if items:
                self._asked[address] = deque(items)
                try:
                    send_frame(self._connections[address], pack_wanted(items))
                except OSError as problem:
                    self._lose(address, problem)

    def _look_for_producers(self) -> None:
        now = time.monotonic()
        for address in self._addresses:
            if address in self._connections or now - self._lost_at.get(address, -ABSENCE_SECONDS) < ABSENCE_SECONDS:
                continue
            try:
                self._connections[address] = self._connect(address)
            except (WireError, OSError) as problem:
                self._lose(address, problem)

    def _connect(self, address: str) -> socket.socket:
        connection = socket.create_connection(self._addresses[address], timeout=SILENCE_SECONDS)
        try:
            prove_token(connection, self._token, is_producer=False)
            send_frame(connection, self._data_set)
            answer, _ = receive_frame(connection)
            if "error" in answer:
                raise WireError(str(answer["error"]))
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, address: str) -> None:
        """Take the next item of a producer; loses it when there is none."""
        try:
            said, payload = receive_frame(self._connections[address])
            found = str(said["error"]) if "error" in said else build_pixels(said, payload)
        except (WireError, OSError, TypeError) as problem:
            self._lose(address, problem)
            return
        self._arrived[self._asked[address].popleft()] = found
        if not self._asked[address]:
            del self._asked[address]

    def _lose(self, address: str, problem: Exception) -> None:
        """Do without a producer for a while."""
        logger.warning("producer %s is done without: %s", address, str(problem) or type(problem).__name__)
        self._lost_at[address] = time.monotonic()
        if (connection := self._connections.pop(address, None)) is not None:
            connection.close()
        self._unasked += tuple(self._asked.pop(address, ()))
