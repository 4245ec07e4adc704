"""A producer: tokenises samples, and decodes the items that ranks request, ahead of their need, in its own processes.

A connection belongs to one reading process of a rank. It first sends a description of its data set and model, so one producer
serves any run; then it sends lists of items, which are returned in that order, a few of them decoded ahead. Tensor and context
parallel ranks want the same items: each is decoded once and kept for the others, as far as memory allows. If there is no index of
the data set yet, samples come first, whose texts are tokenised and whose items are measured.
"""

import json
import logging
import multiprocessing
import os
import socket
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from itertools import islice
from typing import Any

from megatron.runtime.feed.producers.wire import (
    SampleBlock,
    Wanted,
    WireError,
    describe_pixels,
    pack_index,
    prove_token,
    receive_frame,
    send_frame,
    unpack_wanted,
)
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.item_reader import ItemReader, WantedItem, item_inputs
from multimodal.data.index.sample_index import IndexedSample, SampleIndex, build_index
from multimodal.data.index.sample_indexer import IndexOptions, SampleIndexer
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import BraidError, DataError
from multimodal.values.model_graph import ModelGraph

SILENCE_SECONDS = 10.0
"""Seconds within which a connected peer must prove its token and describe its data set."""
ITEMS_AHEAD = 2
"""Items of a connection that are decoded ahead of those sent, per decoding process."""
MOST_DATA_SETS = 8
logger = logging.getLogger(__name__)


class Producer:
    """Serves ranks until it is closed."""

    def __init__(self, *, token: bytes, num_workers: int, cache_bytes: int) -> None:
        """num_workers: number of decoding processes; cache_bytes: most bytes of items that are kept after they were sent."""
        self._token, self._num_workers = token, num_workers
        self._pool = self._make_pool()
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str, WantedItem], Future[ItemPixels]] = OrderedDict()
        self._cache_bytes, self._kept_bytes = cache_bytes, 0

    def serve(self, listener: socket.socket) -> None:
        """Accept connections, a thread for each, until the listener is closed."""
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_peer, args=(connection, address), daemon=True).start()

    def close(self) -> None:
        """End the decoding processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_pool(self) -> ProcessPoolExecutor:
        # Not forked: this process has threads, and its children would share its connections.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._num_workers, mp_context=context, initializer=_end_with_parent)

    def _serve_peer(self, connection: socket.socket, address: Sequence[Any]) -> None:
        pool = self._pool
        with connection:
            try:
                connection.settimeout(SILENCE_SECONDS)
                prove_token(connection, self._token, is_producer=True)
                data_set, _ = receive_frame(connection)
                send_frame(connection, _check_data_set(str(data_set)))
                connection.settimeout(None)
                while True:
                    said, _ = receive_frame(connection)
                    pool = self._pool
                    self._send_items(connection, str(data_set), unpack_wanted(said))
            except (WireError, OSError) as problem:
                logger.info("%s:%s: left (%s)", *address[:2], problem)
            except (BrokenProcessPool, CancelledError):
                logger.warning("a process that decodes was killed; the ranks that waited for it decode by themselves")
                self._replace(pool)

    def _send_items(self, connection: socket.socket, data_set: str, wanted: Sequence[Wanted]) -> None:
        remaining = iter(wanted)
        producing = deque(self._produce(data_set, each) for each in islice(remaining, ITEMS_AHEAD * self._num_workers))
        while producing:
            try:
                found = producing.popleft().result()
                if isinstance(found, ItemPixels):
                    send_frame(connection, describe_pixels(found), found.patches.tobytes())
                else:
                    send_frame(connection, *pack_index(found))
            except BraidError as problem:
                send_frame(connection, {"error": str(problem)})
            producing.extend(self._produce(data_set, each) for each in islice(remaining, 1))

    def _produce(self, data_set: str, wanted: Wanted) -> "Future[ItemPixels] | Future[SampleIndex]":
        if isinstance(wanted, WantedItem):
            return self._decode(data_set, wanted)
        return self._pool.submit(index_block, data_set, wanted)

    def _decode(self, data_set: str, item: WantedItem) -> "Future[ItemPixels]":
        key = data_set, item
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                return found
            future = self._pool.submit(decode_item, data_set, item)
            self._items[key] = future
        future.add_done_callback(lambda done: self._keep(key, done))
        return future

    def _keep(self, key: tuple[str, WantedItem], done: "Future[ItemPixels]") -> None:
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                self._items.pop(key, None)  # it may exist by the next request
                return
            self._kept_bytes += done.result().patches.nbytes
            for each, future in [*self._items.items()]:
                if self._kept_bytes <= self._cache_bytes:
                    return
                if future.done() and not future.exception():
                    self._kept_bytes -= future.result().patches.nbytes
                    del self._items[each]

    def _replace(self, pool: ProcessPoolExecutor) -> None:
        """Start new processes in place of broken ones, once for all requests that were waiting for them."""
        with self._lock:
            if self._pool is pool:
                pool.shutdown(wait=False, cancel_futures=True)
                self._pool = self._make_pool()
                self._items.clear()
                self._kept_bytes = 0


def decode_item(data_set: str, item: WantedItem) -> ItemPixels:
    """Decode one item of a data set, as described for `_open_data_set`; runs in a decoding process."""
    return _open_data_set(data_set).read(item)


def index_block(data_set: str, block: SampleBlock) -> SampleIndex:
    """Index samples of a data set; runs in a decoding process."""
    skipped: Counter[str] = Counter()
    found = _open_indexer(data_set).index_all(block.samples)

    def usable() -> Iterator[IndexedSample]:
        for each in found:
            if isinstance(each, str):
                skipped[each] += 1
            else:
                yield each

    return build_index(usable(), skipped=skipped)


def _end_with_parent() -> None:
    """Let a decoding process end when the producer is killed."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name="producer", daemon=True).start()


def _check_data_set(data_set: str) -> Mapping[str, str]:
    try:
        _open_data_set(data_set)
        _open_indexer(data_set)
    except BraidError as problem:
        return {"error": str(problem)}
    except (KeyError, TypeError, ValueError) as problem:
        raise WireError(f"a data set that is none ({problem})") from problem
    return {}


@lru_cache(maxsize=MOST_DATA_SETS)
def _open_data_set(data_set: str) -> ItemReader:
    """Open a data set; data_set: a result of `describe_data_set`."""
    said = json.loads(data_set)
    return ItemReader(item_inputs(ModelGraph.from_dict(said["model"])), embedded=open_sample_files(said["data_path"]).embedded)


@lru_cache(maxsize=MOST_DATA_SETS)
def _open_indexer(data_set: str) -> SampleIndexer:
    """Open an indexer for a result of `describe_data_set`; raises BraidError if texts would be tokenised differently here."""
    said = json.loads(data_set)
    texts = TextSettings(**said["texts"])
    try:
        identity = texts.identity
    except OSError as problem:
        raise DataError(f"{problem.filename}: the tokenizer cannot be read there ({problem.strerror})") from problem
    if identity != said["identity"]:
        raise DataError(
            f"texts would become other tokens there: the run's tokenizer, template and packages are {said['identity']}, the "
            f"producer's are {identity}; use the same files and versions"
        )
    tokenizer, chat = texts.open()
    files, options = open_sample_files(said["data_path"]), IndexOptions(**said["options"])
    return SampleIndexer(ModelGraph.from_dict(said["model"]), files=files, tokenizer=tokenizer, chat=chat, options=options)
