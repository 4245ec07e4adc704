"""Peers that have connected to a producer and proven nothing: only the newest few stay connected."""

import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

MOST_STRANGERS = 32
"""Far below the files that a process may open, and above the ranks that connect within the milliseconds that a proof takes."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
logger = logging.getLogger(__name__)


class Strangers:
    """The strangers among the peers of a socket that listens.

    ZeroMQ ends a handshake that takes too long, but has no limit for those who begin one.
    """

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
