"""Sockets of this process, some of which lead to other ranks."""

import socket
import threading

import pytest

from megatron.runtime.recovery.connections import Connections, CutError


def connect() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return a listening socket and both ends of a connection to it."""
    listening = socket.create_server(("127.0.0.1", 0))
    there = socket.create_connection(listening.getsockname())
    here, _ = listening.accept()
    there.settimeout(20)
    return listening, here, there


def test_a_cut_ends_what_a_thread_waits_for_and_spares_what_others_opened() -> None:
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
    later = socket.create_connection(own[0].getsockname())  # a listening socket goes on
    for each in (*others, *own, later):
        each.close()


def test_what_is_opened_after_a_cut_is_cut_as_well() -> None:
    connections = Connections()
    sockets: list[socket.socket] = []
    with pytest.raises(CutError), connections.opening():
        connections.cut()
        sockets += connect()
        connections.cut_new()
        assert sockets[2].recv(1) == b""
    with pytest.raises(CutError):
        connections.check()
    connections.forget()
    connections.check()
    for each in sockets:
        each.close()
