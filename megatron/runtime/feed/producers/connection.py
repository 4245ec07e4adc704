"""A rank's connection to a producer, over ZeroMQ with keys (CURVE) from the run's token, for as much as it works ahead."""

import hmac
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from megatron.runtime.feed.producers import wire
from megatron.runtime.feed.producers.wire import Wanted, WireError
from multimodal.data.index.item_reader import ItemReader, WantedItem
from multimodal.data.index.sample_index import SampleIndex
from multimodal.data.sample_source import ItemPixels

HANDSHAKE_SECONDS = 10.0
"""Time for all of the handshake, however many bytes a peer sends meanwhile."""
_BEAT_SECONDS, _BEATLESS_SECONDS = 3, 12
"""Time between signs of life, and without one until a connection ends; libzmq gives them, whatever the process computes."""
SILENCE_SECONDS = 30.0
"""A producer that owes an answer and sends none for this long is given up."""
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
Answer = ItemPixels | SampleIndex | str
"""For what cannot be read: the reason."""


class Keys(NamedTuple):
    """A side's keys (in Z85), and the public one of the other side."""

    secret: bytes
    public: bytes
    other: bytes


def derive_keys(token: bytes, *, is_producer: bool) -> Keys:
    """Return the keys of one side, which follow from the token alone."""
    secrets = [z85.encode(hmac.digest(token, name, "sha256")) for name in (b"rank", b"producer")]
    publics = [zmq.curve_public(secret) for secret in secrets]
    return Keys(secrets[is_producer], publics[is_producer], publics[not is_producer])


def set_options(socket: zmq.Socket, keys: Keys, *, most_bytes: int) -> None:
    """Set keys and limits; most_bytes: largest part of a message that the other side may send."""
    socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * _BEAT_SECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * _BEATLESS_SECONDS)


class RefusedError(WireError):
    """The peer ended the connection before either side had proven that it knows the token."""


class Connection:
    """An open connection; all methods raise WireError if the producer is lost."""

    def __init__(self, address: tuple[str, int], *, context: zmq.Context, keys: Keys, data_set: str, local: ItemReader) -> None:
        """Connect, exchange proofs of the token, open the data set; local: knows items' shapes. Raises WireError or OSError."""
        with socket.create_connection(address, timeout=HANDSHAKE_SECONDS) as reached:  # says why, where there is nobody
            (host, port), is_long = reached.getpeername()[:2], reached.family == socket.AF_INET6
        self._local = local
        self.owed: dict[Wanted, None] = {}
        """All that was asked for and has not come, in order."""
        self._waiting: deque[Wanted] = deque()
        """Those of them for which no request was sent yet."""
        self._sent: dict[int, Wanted | None] = {}
        """Number of a request -> what it asks for; None: it is no longer wanted."""
        self._num_sent = 0
        self._socket = context.socket(zmq.DEALER)
        set_options(self._socket, keys, most_bytes=wire.MOST_ANSWER_BYTES)
        self._socket.curve_serverkey = keys.other
        self._socket.setsockopt(zmq.IPV6, is_long)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self._socket.get_monitor_socket(_ENDS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        try:
            self._socket.connect(f"tcp://[{host}]:{port}" if is_long else f"tcp://{host}:{port}")
            self._prove_token()
            self._sent[self._send(data_set.encode())] = None
            _, said, _ = self._receive()
            if "error" in said:
                raise WireError(str(said["error"]))
            self._ahead, self._sent = int(said["ahead"]), {}
        except (KeyError, TypeError, ValueError) as problem:
            self.close()
            raise WireError(f"an answer that is none ({problem})") from problem
        except BaseException:
            self.close()
            raise

    def _prove_token(self) -> None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        while self._monitor.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            raise RefusedError("it has another token, or is no producer")
        raise WireError(f"it did not prove the token within {HANDSHAKE_SECONDS:.0f} s")

    def ask(self, wanted: Iterable[Wanted]) -> None:
        """Ask for these, too."""
        new = dict.fromkeys(wanted)
        self.owed |= new
        self._waiting.extend(new)
        self._send_requests()

    def forget(self) -> None:
        """Want nothing any more that was asked for."""
        self._sent = dict.fromkeys(self._sent)
        self._waiting.clear()
        self.owed.clear()

    def receive(self) -> tuple[Wanted, Answer]:
        """Wait for something that is owed."""
        while True:
            number, said, payload = self._receive()
            wanted = self._sent.pop(number)
            self._send_requests()
            if wanted is not None:
                found = self._read_answer(wanted, said, payload)
                del self.owed[wanted]
                return wanted, found

    def close(self) -> None:
        """Close it, whatever is owed."""
        with suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _send_requests(self) -> None:
        while self._waiting and len(self._sent) < self._ahead:
            wanted = self._waiting.popleft()
            self._sent[self._send(wire.pack_message(wire.pack_wanted(wanted)))] = wanted

    def _send(self, text: bytes) -> int:
        try:
            self._socket.send_multipart([b"%d" % self._num_sent, text], zmq.NOBLOCK)
        except zmq.ZMQError as problem:
            raise WireError("the connection was closed") from problem
        self._num_sent += 1
        return self._num_sent - 1

    def _receive(self) -> tuple[int, dict[str, Any], memoryview]:
        deadline = time.monotonic() + SILENCE_SECONDS
        while not self._socket.poll(0):
            ready = dict(self._poller.poll(max(0, round(1000 * (deadline - time.monotonic())))))
            if not ready:
                raise WireError(f"it said nothing for {SILENCE_SECONDS:.0f} s")
            if self._monitor in ready and recv_monitor_message(self._monitor)["event"] & _ENDS and not self._socket.poll(0):
                raise WireError("the connection was closed")
        try:
            number, text, payload = self._socket.recv_multipart(copy=False)
            said = wire.unpack_message(text.buffer)
            if not isinstance(said, dict) or int(number.bytes) not in self._sent:
                raise ValueError("to no request")
        except ValueError as problem:
            raise WireError(f"an answer that is none ({problem})") from problem
        if "failure" in said:
            raise WireError(str(said["failure"]))
        return int(number.bytes), said, payload.buffer

    def _read_answer(self, wanted: Wanted, said: dict[str, Any], payload: memoryview) -> Answer:
        if "error" in said:
            return str(said["error"])
        if not isinstance(wanted, WantedItem):
            return wire.unpack_index(said, payload, num_samples=len(wanted.samples))
        pixels = wire.unpack_pixels(said, payload)
        if not self._local.is_shaped(wanted, pixels):
            raise WireError(f"an item that is none (of shape {pixels.patches.shape} for a grid of {wanted.item.grid})")
        return pixels
