"""Sockets of this process, some of which lead to other ranks."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.recovery.connections import Connections, CutError, drop

Connect = Callable[[], list[socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open a listening socket and both ends of a connection to it, until the test ends."""
    with ExitStack() as stack:

        def connect() -> list[socket.socket]:
            listening = socket.create_server(("127.0.0.1", 0))
            there = socket.create_connection(listening.getsockname(), timeout=20)
            return [stack.enter_context(each) for each in (listening, listening.accept()[0], there)]

        yield connect


def test_a_cut_ends_what_a_thread_waits_for_and_spares_what_others_opened(connect: Connect) -> None:
    others, connections = connect(), Connections()
    with connections.opening():
        own = connect()
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(own[2].recv(1)))
    thread.start()
    connections.cut()
    thread.join(20)
    assert received == [b""]
    others[1].send(b"x")
    assert others[2].recv(1) == b"x"
    socket.create_connection(own[0].getsockname()).close()  # a listening socket goes on


def test_what_is_opened_after_a_cut_is_cut_as_well(connect: Connect) -> None:
    connections = Connections()
    with pytest.raises(CutError), connections.opening():
        connections.cut()
        sockets = connect()
        connections.cut_new()
        assert sockets[2].recv(1) == b""
    with pytest.raises(CutError):
        connections.check()
    connections.forget()
    connections.check()


def test_what_is_opened_for_the_next_generation_is_not_cut_by_who_is_late(connect: Connect) -> None:
    connections = Connections()
    connections.cut()
    connections.forget()
    with connections.opening():
        sockets = connect()
        connections.cut_new()
    connections.cut_new()
    sockets[1].send(b"x")
    assert sockets[2].recv(1) == b"x"


class LeavingStore(dist.Store):
    """A rank's store: it tells where the rank can be reached, and then the rank leaves."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        raise RuntimeError(f"left before {key}")

    def wait(self, *keys: object) -> None:
        raise RuntimeError(f"left before {keys}")


def test_a_rank_that_waits_to_be_connected_to_by_one_that_has_left_gives_up() -> None:
    """Which of the two connects, their addresses decide: in a few tries both cases come up."""
    for number in range(6):
        connections, store = Connections(), dist.PrefixStore(str(number), dist.HashStore())
        thread = threading.Thread(target=make_group, args=(store, 0), daemon=True)
        with pytest.raises(CutError), connections.opening():
            thread.start()
            make_group(LeavingStore(store), 1)
            for _ in range(400):
                connections.cut()
                thread.join(0.05)
                if not thread.is_alive():
                    break
            assert not thread.is_alive(), "it waits for a connection"


def test_groups_whose_threads_wait_are_dropped_without_a_wait() -> None:
    """gloo waits for its threads when a group is taken down, and one of them for a rank that never takes part."""
    store, groups = dist.HashStore(), dict[int, dist.ProcessGroupGloo]()

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=3))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work = groups[0].allreduce([torch.ones(1)])
    forgotten: list[object] = [groups.pop(0)]
    drop(forgotten)
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="Timed out"):
        work.wait()


def make_group(store: dist.Store, rank: int) -> None:
    with suppress(RuntimeError):  # of a rank whose waits were ended only what it does next fails
        dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=300))
