"""The connections of this process to other ranks, all of which can be cut at once, whatever threads wait for on them.

gloo cannot be made to give up (`abort` of its process groups does nothing): a rank would wait for peers that are alive but have
left, until the timeout. Shutting the sockets down makes every call on them fail at once, in this process and at the other ends.
torch aborts NCCL's communicators.

While a group is being created there may be nothing to shut down: of two ranks one connects, and the other waits for it without a
socket, even if the first one has left. Such a wait is ended by a connection in the peer's name, which is closed at once.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread

import torch.distributed as dist

_MOST_PAIRS = 128
"""Most pairs of a gloo group for which a wait for a peer's connection can be ended."""


class CutError(RuntimeError):
    """The connections to other ranks were cut, since some of the ranks are lost."""


class Connections:
    """The connections that were opened inside `opening` since the last `forget`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._own: set[tuple[int, str]] = set()
        self._before: set[tuple[int, str]] | None = None
        self.is_cut = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Count the sockets that are opened inside as connections to ranks; raises CutError if they are cut meanwhile."""
        with self._lock:
            self._before = before = _open_sockets()
        try:
            self.check()
            yield
        finally:
            with self._lock:
                if self._before is before:  # else another thread opens sockets of a later generation
                    self._own |= _open_sockets() - before
                    self._before = None
        self.check()

    def check(self) -> None:
        """Raise CutError if the connections are cut."""
        if self.is_cut:
            self.cut()
            raise CutError("the connections to other ranks are cut")

    def cut(self) -> None:
        """Cut the connections, including those that are being opened; may be called from any thread."""
        self.is_cut = True
        self.cut_new()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def cut_new(self) -> None:
        """Cut the open connections, until `forget`; to be repeated, as a thread that opens some does not know of the cut."""
        with self._lock:
            if not self.is_cut:
                return
            opened = _open_sockets() - self._before if self._before is not None else set()
            for descriptor, name in (self._own | opened) & _open_sockets():
                with suppress(OSError):
                    copy = os.dup(descriptor)
                    with socket.socket(fileno=copy) as own:
                        listens = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo ends the process if these break
                        if os.readlink(f"/proc/self/fd/{copy}") == name and not listens:
                            own.shutdown(socket.SHUT_RDWR)
            for descriptor, _ in opened:
                _end_waits(descriptor)

    def forget(self) -> None:
        """Reset the list after all connections are closed, so that new ones may be opened."""
        with self._lock:
            self._own.clear()
            self._before = None
            self.is_cut = False


def forget_groups() -> list[object]:
    """Forget all process groups without the other ranks, and torch's counter of their names; returns them for `drop`."""
    groups: list[object] = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0
    return groups


def drop(groups: list[object]) -> None:
    """Destroy forgotten groups in a thread: gloo waits for its own threads, one of which may wait until its timeout."""
    Thread(target=groups.clear, daemon=True).start()


def _open_sockets() -> set[tuple[int, str]]:
    """Return the descriptors of this process's sockets, each with the socket's own number."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if (name := os.readlink(f"/proc/self/fd/{entry}")).startswith("socket:"):
                found.add((int(entry), name))
    return found


def _end_waits(descriptor: int) -> None:
    """Connect to a listening socket of gloo as each pair's peer would, by sending the pair's number."""
    with suppress(OSError):
        with socket.socket(fileno=os.dup(descriptor)) as own:
            if not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return
            address = own.getsockname()[:2]
        for number in range(_MOST_PAIRS):
            with socket.create_connection(address, timeout=1.0) as peer:
                peer.sendall(struct.pack("=q", number))
