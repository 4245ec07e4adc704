"""A producer: tokenises samples, and decodes the items that ranks request, ahead of their need, in its own processes.

A connection belongs to one reading process of a rank. It first describes its data set and model, so one producer serves any run;
then it asks for items, a few at a time. Ranks that want the same item get it decoded once, as far as memory allows. Without an
index of the data set, samples come first, to be tokenised and measured.
"""

import asyncio
import hmac
import json
import logging
import multiprocessing
import socket
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from megatron.runtime.feed.producers import wire
from megatron.runtime.feed.producers.connection import derive_keys, set_options
from megatron.runtime.feed.producers.wire import SampleBlock, Wanted, WireError
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.item_reader import ItemReader, WantedItem
from multimodal.data.index.sample_index import SampleIndex
from multimodal.data.index.sample_indexer import IndexOptions, SampleIndexer, end_with_parent
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import BraidError, DataError
from multimodal.values.model_graph import ModelGraph

MOST_STRANGERS = 32
"""Far below the files that a process may open, and above the ranks that connect within the milliseconds that a proof takes."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Strangers:
    """The strangers among the peers of a socket, of whom ZeroMQ ends slow handshakes but limits no number."""

    def __init__(self, listening: zmq.asyncio.Socket, *, port: int) -> None:
        self._monitor, self._port = listening.get_monitor_socket(_EVENTS), port
        self._open: dict[int, None] = {}
        """The descriptors of their connections, oldest first."""
        self._num_refused = 0

    async def watch(self) -> None:
        """Watch connections come and go, for ever."""
        while True:
            self._note(parse_monitor_message(await self._monitor.recv_multipart()))
            # Descriptors are used again: nobody is cut before all that is known of them is read.
            while await self._monitor.poll(0):
                self._note(parse_monitor_message(await self._monitor.recv_multipart()))
            while len(self._open) > MOST_STRANGERS:
                oldest = next(iter(self._open))
                self.forget(oldest)
                self._cut(oldest)
                self._refuse("has to make place for others")

    def _note(self, event: Mapping[str, Any]) -> None:
        kind, descriptor = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self.forget(descriptor)
            self._open[descriptor] = None
        elif kind == zmq.EVENT_DISCONNECTED:
            self.forget(descriptor)
        else:
            self._refuse("has another token, or is no rank")

    def forget(self, descriptor: int) -> None:
        """Take a peer off the list: it has proven the token, or left."""
        self._open.pop(descriptor, None)

    def _cut(self, descriptor: int) -> None:
        with suppress(OSError):  # closed meanwhile, or no socket any more
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.getsockname()[1:2] == (self._port,):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # it is not this object's to close

    def _refuse(self, why: str) -> None:
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # ever less often: strangers do not fill the log
            logger.warning("refused connection number %d without proof of the token: the peer %s", self._num_refused, why)


ITEMS_AHEAD = 2
"""Items of a connection that are decoded ahead of those received, per decoding process."""
MOST_DATA_SETS = 8
MOST_CONNECTIONS = 10_000
"""Connections whose data sets are remembered, the least recently used of which are forgotten first."""
IO_THREADS = 2
"""Threads that encrypt and send."""
logger = logging.getLogger(__name__)


class Producer:
    """Serves ranks until it is closed."""

    def __init__(self, *, token: bytes, num_workers: int, cache_bytes: int) -> None:
        """num_workers: number of decoding processes; cache_bytes: most bytes of items that are kept after they were sent."""
        self._keys, self._num_workers = derive_keys(token, is_producer=True), num_workers
        self._pool = self._make_pool()
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str, WantedItem], Future[ItemPixels]] = OrderedDict()
        self._cache_bytes, self._kept_bytes = cache_bytes, 0
        self._data_sets: OrderedDict[bytes, str] = OrderedDict()
        """Connection -> its data set."""
        self._num_unanswered: Counter[bytes] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = asyncio.Event()

    def serve(self, listener: socket.socket) -> None:
        """Answer all who connect to the listener, which is closed at the end, until this is closed."""
        asyncio.run(self._serve(listener))

    def close(self) -> None:
        """End; may be called from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._is_closed.set)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_pool(self) -> ProcessPoolExecutor:
        # Not forked: this process has threads, and its children would share its connections.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._num_workers, mp_context=context, initializer=end_with_parent)

    @property
    def _num_ahead(self) -> int:
        return ITEMS_AHEAD * self._num_workers

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        context = zmq.asyncio.Context(io_threads=IO_THREADS)
        admission = AsyncioAuthenticator(context)
        admission.start()
        only_ranks = SimpleNamespace(callback=lambda domain, key: hmac.compare_digest(key, self._keys.other))
        admission.configure_curve_callback("*", only_ranks)
        router = context.socket(zmq.ROUTER)
        set_options(router, self._keys, most_bytes=wire.MOST_REQUEST_BYTES)
        router.curve_server = True
        router.setsockopt(zmq.SNDHWM, 4 * self._num_ahead)  # more than a rank may be owed: none that fits is dropped
        port = listener.getsockname()[1]
        listener.setblocking(False)
        router.setsockopt(zmq.USE_FD, listener.detach())
        strangers = Strangers(router, port=port)
        router.bind("tcp://127.0.0.1:*")  # the listener's address, not this one
        tasks = {asyncio.ensure_future(each) for each in (strangers.watch(), self._answer_all(router, strangers))}
        closed = asyncio.ensure_future(self._is_closed.wait())
        try:
            done, _ = await asyncio.wait({*tasks, closed}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            router.disable_monitor()
            admission.stop()
            context.destroy(0)

    async def _answer_all(self, router: zmq.asyncio.Socket, strangers: Strangers) -> None:
        answers: set[asyncio.Task[None]] = set()
        while True:
            peer, number, *rest = await router.recv_multipart(copy=False)
            strangers.forget(number.get(zmq.SRCFD))
            name = peer.bytes
            if len(rest) != 1 or self._num_unanswered[name] > self._num_ahead:
                logger.warning("a rank asks for more than it may, and gets no answer")
                continue
            self._num_unanswered[name] += 1
            task = asyncio.ensure_future(self._answer(router, name, number.bytes, rest[0].bytes))
            answers.add(task)
            task.add_done_callback(answers.discard)

    async def _answer(self, router: zmq.asyncio.Socket, peer: bytes, number: bytes, text: bytes) -> None:
        pool, payload = self._pool, b""
        said: Mapping[str, Any]
        try:
            if peer not in self._data_sets:
                said = await self._open(peer, text.decode())
            else:
                self._data_sets.move_to_end(peer)
                wanted = wire.unpack_wanted(wire.unpack_message(text))
                found = await asyncio.wrap_future(self._decode(self._data_sets[peer], wanted))
                said, payload = wire.pack_pixels(found) if isinstance(found, ItemPixels) else wire.pack_index(found)
        except BraidError as problem:
            said = {"error": str(problem)}
        except (BrokenProcessPool, CancelledError, asyncio.CancelledError) as problem:
            if self._is_closed.is_set():
                raise
            logger.warning("a process that decodes was killed; the ranks that waited for it decode by themselves")
            self._replace(pool)
            said = {"failure": f"a process that decodes was killed ({type(problem).__name__})"}
        except Exception as problem:  # whatever was asked
            logger.warning("a request failed: %s", problem or type(problem).__name__)
            said = {"failure": str(problem) or type(problem).__name__}
        if self._num_unanswered[peer] > 1:
            self._num_unanswered[peer] -= 1
        else:
            del self._num_unanswered[peer]
        await router.send_multipart([peer, number, wire.pack_message(said), payload], copy=False)

    async def _open(self, peer: bytes, data_set: str) -> Mapping[str, Any]:
        await asyncio.to_thread(_check_data_set, data_set)
        self._data_sets[peer] = sys.intern(data_set)
        while len(self._data_sets) > MOST_CONNECTIONS:
            self._data_sets.popitem(last=False)
        return {"ahead": self._num_ahead}

    def _decode(self, data_set: str, wanted: Wanted) -> "Future[Any]":
        if not isinstance(wanted, WantedItem):
            return self._pool.submit(index_block, data_set, wanted)
        key = data_set, wanted
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                return found
            future = self._pool.submit(decode_item, data_set, wanted)
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
    return _open_indexer(data_set).index_block(block.samples)


def _check_data_set(data_set: str) -> None:
    try:
        _open_data_set(data_set)
        _open_indexer(data_set)
    except BraidError:  # a ValueError, too; the rank is told its message
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as problem:
        raise WireError(f"a data set that is none ({problem})") from problem


@lru_cache(maxsize=MOST_DATA_SETS)
def _open_data_set(data_set: str) -> ItemReader:
    """Open a data set; data_set: a result of `describe_data_set`."""
    said = json.loads(data_set)
    return ItemReader(ModelGraph.from_dict(said["model"]), open_sample_files(said["data_path"]))


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
