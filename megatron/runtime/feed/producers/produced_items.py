"""Items that producers decode, or samples that they index, as a rank's reading process sees them: in any order.

What a producer that is gone, or silent for too long, still owed is requested from the others, or decoded here if there are none.
So every item arrives once; a producer that is back is used again.
"""

import json
import logging
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import zmq

from megatron.runtime.feed.producers.connection import Answer, Connection, RefusedError, derive_keys
from megatron.runtime.feed.producers.wire import SampleBlock, Wanted, WireError, parse_address
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.conversation import TextSegment
from multimodal.data.forms.segments import SegmentedSample
from multimodal.data.index.item_reader import ItemReader, WantedItem
from multimodal.data.index.sample_index import SampleIndex
from multimodal.data.index.sample_indexer import IndexOptions, SampleIndexer, gather
from multimodal.data.remote import DataPath
from multimodal.data.remote import data_path as path_of_data
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph

_MOST_REFUSALS = 5
"""Times that a producer may end a connection at once before it counts as one with another token."""
ABSENCE_SECONDS = 30.0
"""Time after which a lost producer is tried again."""
_BLOCK_WEIGHT = 2**20
"""Letters of the samples that a producer indexes at a time, in addition to a fixed weight of each sample."""
_SAMPLE_WEIGHT = _BLOCK_WEIGHT // 64
_BLOCKS_ASKED = 8
"""Blocks that are expected of a producer at once."""
logger = logging.getLogger(__name__)


def describe_data_set(graph: ModelGraph, data_path: str | DataPath, *, texts: TextSettings, options: IndexOptions) -> str:
    """Return everything that a producer must know of a data set: the model's units, its location, and the text settings."""
    found = replace(texts, tokenizer_model=_absolute(texts.tokenizer_model), chat_template=_absolute(texts.chat_template))
    said = {"model": graph.to_dict(), "data_path": str(path_of_data(data_path).absolute()), "options": asdict(options)}
    return json.dumps({**said, "texts": asdict(found), "identity": texts.identity})


def _absolute(path: str | None) -> str | None:
    return str(Path(path).absolute()) if path is not None and Path(path).exists() else path


class ProducedItems:
    """An `ItemDecoder` whose items come from producers, which index samples, too."""

    def __init__(self, addresses: Sequence[str], *, token: bytes, data_set: str, local: ItemReader) -> None:
        """local: decodes items that no producer does."""
        self._addresses = {address: parse_address(address) for address in addresses}
        self._keys = derive_keys(token, is_producer=False)
        self._data_set, self._local = data_set, local
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
        self.close()

    def close(self) -> None:
        """Close all connections, which processes that are forked later would keep open; they are opened again on demand."""
        for connection in self._connections.values():
            connection.close()
        self._forget_connections()

    def expect(self, wanted: Sequence[Wanted]) -> None:
        """Request all of these from producers now; O(items)."""
        if self._process != os.getpid():
            self._forget_connections()  # a forked process reads from its own connections
        for connection in self._connections.values():
            connection.forget()
        self._arrived.clear()
        now = time.monotonic()
        for address in self._addresses:
            if address in self._connections or now - self._lost_at.get(address, -ABSENCE_SECONDS) < ABSENCE_SECONDS:
                continue
            try:
                self._connections[address] = self._connect(address)
            except (WireError, OSError) as problem:
                self._lose(address, problem)
        self._ask(dict.fromkeys(wanted))

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Take one item, waiting until it arrives; raises DataError if it cannot be decoded."""
        found = self._take(wanted)
        return found if isinstance(found, ItemPixels) else self._local.read(wanted)

    def index_all(self, local: SampleIndexer, samples: Iterable[SegmentedSample]) -> Iterator[SampleIndex]:
        """Let producers index samples (`Indexing`); a reading error is raised after all samples before it, as without them."""
        gathered = gather(samples, weight=_weight, most=_BLOCK_WEIGHT)
        blocks = (SampleBlock(number, tuple(each)) for number, each in enumerate(gathered))
        window = len(self._addresses) * _BLOCKS_ASKED * _BLOCK_WEIGHT
        try:
            for asked in gather(blocks, weight=lambda block: sum(map(_weight, block.samples)), most=window):
                self.expect(asked)
                for block in asked:
                    found = self._take(block)
                    yield found if isinstance(found, SampleIndex) else local.index_block(block.samples)
        finally:
            self.close()

    def _take(self, wanted: Wanted) -> ItemPixels | SampleIndex | None:
        """Wait until the wanted item arrives; None if there is no producer. Raises DataError if it cannot be read."""
        is_expected = wanted in self._arrived or wanted in self._unasked or self._find_debtor(wanted) is not None
        if self._process != os.getpid() or not is_expected:
            self.expect([wanted])
        while wanted not in self._arrived:
            if (address := self._find_debtor(wanted)) is not None:
                self._receive(address)
            elif self._connections:
                self._ask(self._unasked)
            else:
                return None
        found = self._arrived[wanted]
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        self._connections: dict[str, Connection] = {}
        self._lost_at: dict[str, float] = {}
        self._unasked: tuple[Wanted, ...] = ()
        """Items that lost producers still owed, or for which there was no producer."""
        self._arrived: dict[Wanted, Answer] = {}

    def _find_debtor(self, wanted: Wanted) -> str | None:
        return next((address for address, connection in self._connections.items() if wanted in connection.owed), None)

    def _ask(self, wanted: Iterable[Wanted]) -> None:
        addresses = [each for each in self._addresses if each in self._connections]
        self._unasked = () if addresses else (*wanted,)
        shares: dict[str, list[Wanted]] = {address: [] for address in addresses}
        for each in wanted if addresses else ():
            # Ranks with the same item choose the same producer, which decodes it once.
            number = zlib.crc32(f"{each.item.path} {each.item.tile}".encode()) if isinstance(each, WantedItem) else each.number
            shares[addresses[number % len(addresses)]].append(each)
        for address, items in shares.items():
            try:
                self._connections[address].ask(items)
            except WireError as problem:
                self._lose(address, problem)

    def _connect(self, address: str) -> Connection:
        # The process's own context, which is another after a fork. The end of one made here would wait for its sockets, in
        # whichever thread collects garbage.
        place = self._addresses[address]
        connect = partial(
            Connection, place, context=zmq.Context.instance(), keys=self._keys, data_set=self._data_set, local=self._local
        )
        for _ in range(_MOST_REFUSALS - 1):
            with suppress(RefusedError):  # many strangers call the producer: it may cut off who has not proven the token yet
                return connect()
        return connect()

    def _receive(self, address: str) -> None:
        """Take an item of a producer; give the producer up if there is none."""
        try:
            wanted, found = self._connections[address].receive()
        except WireError as problem:
            self._lose(address, problem)
        else:
            self._arrived[wanted] = found

    def _lose(self, address: str, problem: Exception) -> None:
        logger.warning("producer %s is done without: %s", address, str(problem) or type(problem).__name__)
        self._lost_at[address] = time.monotonic()
        if (connection := self._connections.pop(address, None)) is not None:
            self._unasked += (*connection.owed,)
            connection.close()


def _weight(sample: SegmentedSample) -> int:
    return _SAMPLE_WEIGHT + sum(len(each.text) for each in sample.segments if isinstance(each, TextSegment))
