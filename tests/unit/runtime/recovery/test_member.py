"""A supervisor takes over a node that another one has started before, and what forks ranks outlives requests to stop."""

import ast
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.launch.meeting import wait_until
from megatron.runtime.launch.rank_place import read_token
from megatron.runtime.recovery import ledger, member, supervisor
from megatron.runtime.recovery.connections import Connections, CutError, drop
from megatron.runtime.recovery.ledger import Ledger, keep
from megatron.runtime.recovery.member import LeftBehindError, Member, find_standstill
from megatron.runtime.recovery.supervisor import Supervisor, main, read_flags
from multimodal.plan.planners.templates.reconfigure import Reconfigurer
from multimodal.values.errors import ConfigError
from tools.launch import free_port

TOKEN = "known to all of the run"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_ELASTIC_TOKEN", TOKEN)


def test_a_node_under_another_supervisor_is_a_new_incarnation():
    """Signs of life of the old one, and the order to end it, are not taken for those of the new one."""
    port = free_port()
    before = Ledger(keep("127.0.0.1", port), TOKEN.encode())
    before.set_flag("processes/3", "1:40,41")
    flags, command = read_flags(["--nodes", "5", "--node", "3", "--nodes-here", "2", "--port", str(port), "program.py"])
    supervised = Supervisor(flags, command)
    assert [node.incarnation for node in supervised._nodes] == [1, -1]
    environment = supervised._environment(supervised._nodes[0], 0)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "ranks may abort communicators without being ended by torch"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_store_that_is_gone_or_does_not_answer_ends_the_supervisor_with_a_message(is_frozen, monkeypatch, capsys):
    port, thaw, handlers = free_port(), threading.Event(), {}
    kept = [keep("127.0.0.1", port)]
    flags, command = read_flags(["--nodes", "1", "--port", str(port), "program.py"])
    supervised = Supervisor(flags, command)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    if is_frozen:
        monkeypatch.setattr(supervised, "_patience_seconds", 0.1)
        monkeypatch.setattr(supervised._ledger, "tell", lambda *args, **values: thaw.wait())
    else:
        supervised._has_forked = True
        supervised._nodes[0].processes = [SimpleNamespace(pid=None, kill=lambda: None)]  # starting: 0 would be the whole group
        monkeypatch.setattr(supervised, "_start", lambda node: (handlers[15](15, None), supervised._ledger.flag("other")))
        kept.clear()
    assert supervised.run() == 1
    assert supervised._requests == ([] if is_frozen else [signal.SIGTERM])
    reason = " (the store in which the ranks meet does not answer" if is_frozen else ""
    assert f"the store at 127.0.0.1:{port} is gone{reason}" in capsys.readouterr().err
    thaw.set()


def test_a_request_to_stop_ends_a_supervisor_that_has_forked_no_rank_yet(monkeypatch, capsys):
    """Others of the run do not wait for its node, and what imports for the ranks is not waited for."""
    kept = Ledger(keep("127.0.0.1", port := free_port()), TOKEN.encode())
    supervised = Supervisor(*read_flags(["--nodes", "1", "--port", str(port), "program.py"]))
    monkeypatch.setattr(supervised, "_context", SimpleNamespace(Process=lambda **how: SimpleNamespace(start=request)))
    handlers: dict[int, Callable[[int, object], None]] = {}
    request = lambda: handlers[signal.SIGTERM](signal.SIGTERM, None)  # noqa: E731
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(supervisor, "end_process", sys.exit)
    with pytest.raises(SystemExit, match="143"):
        supervised.run()
    told = iter(partial(kept.next_event, seconds=1.0), None)
    assert [event["kind"] for event in told] == ["started", "died", "left"]
    assert "ended by SIGTERM before ranks started" in capsys.readouterr().err


def test_a_request_to_stop_does_not_end_the_process_that_forks_ranks():
    """Slurm sends it to every process of a step; a rank handles it itself, and what came while it was forked."""
    program = """
import os, signal
from megatron.runtime.recovery.preloaded import die_with_supervisor
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
print("alive", flush=True)
die_with_supervisor()
print("still alive")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("alive\n", -signal.SIGUSR1), found.stderr


def test_no_recovery_waits_for_an_import():
    inside = [node for node in ast.walk(ast.parse(inspect.getsource(Reconfigurer))) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in inside} <= {*supervisor._PRELOADED}


def test_a_rank_ends_with_its_supervisor_though_the_process_that_forked_it_waits_for_ranks():
    rank = """
import multiprocessing, os, time
from megatron.runtime.recovery.preloaded import die_with_supervisor
die_with_supervisor()
os.kill(multiprocessing.parent_process().pid, 9)
time.sleep(600)
"""
    supervisor = f"import multiprocessing as m; m.get_context('forkserver').Process(target=exec, args=({rank!r},)).start()"
    subprocess.run([sys.executable, "-c", supervisor], capture_output=True, timeout=60)  # until none has its output open


def test_the_store_listens_at_its_address_only():
    port = free_port()
    kept = keep("127.0.0.1", port)
    socket.create_connection(("127.0.0.1", port), timeout=20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)
    del kept


def test_a_name_that_means_this_machine_only_to_itself_is_listened_to_everywhere(monkeypatch, caplog):
    """Debian gives a machine's own name 127.0.1.1, where ranks of other machines would look in vain."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: found)
    with ledger._listen("node1", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert "node1 is 127.0.1.1 on this machine" in caplog.text


def test_a_port_that_is_taken_is_one_error(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["--keeps-store", "--nodes", "1", "--port", str(port), "program.py"]) == 2
    assert f"the store cannot listen at 127.0.0.1:{port} (Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--nodes-here", "1"], "need a token that all of them know"),
        (["--keeps-store", "--supervisors", "2"], "need a token that all of them know"),
        (["--token", "nowhere"], "--token nowhere: the run's token cannot be read (No such file or directory)"),
        (["--token", "/dev/null"], "--token /dev/null: the token has 0 bytes, expected at least 16"),
    ],
)
def test_supervisors_without_a_common_token_are_told_how_to_make_one(flags, expected, monkeypatch, capsys):
    monkeypatch.delenv("BRAID_ELASTIC_TOKEN")
    assert main(["--nodes", "2", *flags, "program.py"]) == 2
    message = capsys.readouterr().err
    assert expected in message and "secrets.token_hex()" in message


def test_a_supervisor_alone_makes_a_token_of_its_own(monkeypatch):
    monkeypatch.delenv("BRAID_ELASTIC_TOKEN")
    found = [read_flags(["--keeps-store", "--nodes", "2", "program.py"])[0].secret for _ in range(2)]
    assert found[0] != found[1] and min(map(len, found)) >= 32


def test_a_token_in_a_file_is_read_without_space_and_has_no_zeros(tmp_path):
    path, secret = tmp_path / "token", b"0123456789abcdef"
    for content in (secret + b"\n", secret):
        path.write_bytes(content)
        assert read_token(path, flag="--token") == secret
    path.write_bytes(secret + b"\0" + secret)
    with pytest.raises(ConfigError, match="^--token .*token: the token has 33 bytes, expected at least 16, none zero; make one"):
        read_token(path, flag="--token")


def test_a_store_that_nobody_keeps_is_one_error(monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "open_ledger", lambda *args: ledger.open_ledger(*args, seconds=1))
    port = free_port()
    assert main(["--nodes", "1", "--port", str(port), "program.py"]) == 1
    assert f"supervisor: error: the store at 127.0.0.1:{port} cannot be reached" in capsys.readouterr().err


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Work:
    wait = os.read


class Pipe(NamedTuple):
    reading: int
    writing: int
    ended: list[str]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = Pipe(*os.pipe(), [])
    yield found
    for end in found[:2]:
        os.close(end)


@pytest.fixture
def waiting(pipe: Pipe) -> Member:
    """Return a rank in its third generation, whose training thread waits for others."""
    found = Member.__new__(Member)
    found.connections, found.generation, found._has_left, found._lock = Connections(), 3, False, threading.Lock()

    def train() -> None:
        try:
            Work.wait(pipe.reading, 1)
        except BaseException as problem:
            pipe.ended.append(type(problem).__name__)

    found._trainer = start(train)
    limit = threading.Timer(20, lambda: setattr(found, "_has_left", True))
    limit.daemon = True
    limit.start()
    return found


def test_a_thread_that_waits_in_vain_is_replaced(waiting, pipe, monkeypatch):
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    first, went_on = waiting._trainer, threading.Event()
    waiting.go_on = lambda: (waiting.check_in_charge(), went_on.set())
    waiting._cut_until_left(3)
    assert went_on.wait(20) and waiting._trainer is not first
    with pytest.raises(LeftBehindError):
        waiting.check_in_charge()  # as this thread is not it
    os.write(pipe.writing, b"x")
    first.join(20)
    assert pipe.ended == ["LeftBehindError"], "its wait ends, much later"


def test_a_gpu_may_be_waited_for_and_who_has_left_is_let_go(waiting, monkeypatch):
    monkeypatch.setattr(member, "_STUCK_SECONDS", 0.1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    first = waiting._trainer
    waiting.go_on = lambda: None
    threading.Timer(0.5, lambda: setattr(waiting, "_has_left", True)).start()
    waiting._cut_until_left(3)
    assert waiting._trainer is first


def test_a_rank_whose_abort_does_not_return_is_replaced_by_its_supervisor(waiting, monkeypatch):
    """Its signs of life go on, but it arrives nowhere: the keeper gives its node up, which starts anew."""
    never, port = threading.Event(), free_port()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", never.wait)
    kept = Ledger(keep("127.0.0.1", port), TOKEN.encode())
    waiting.identity, waiting._timeout_seconds = ledger.Identity(0, 0, 0), 0.5
    waiting.place_in_step = lambda: (1, 2)
    waiting._store_watch = SimpleNamespace(note_answer=lambda: None)
    cutting = start(lambda: waiting._cut_until_left(3))
    beating = start(lambda: waiting._beat(ledger.open_ledger("127.0.0.1", port, TOKEN.encode())))
    assert wait_until(lambda: int(kept.flag("beat/0/0/0") or 0) > 2, seconds=20) and cutting.is_alive()
    flags, command = read_flags(["--nodes", "1", "--return-after", "0", "--port", str(port), "program.py"])
    supervised, ended, started = Supervisor(flags, command), [], []
    monkeypatch.setattr(supervised, "_start", started.append)
    (node,) = supervised._nodes
    node.incarnation, node.processes = 0, (process := [SimpleNamespace(pid=7, exitcode=None, kill=list, join=list)])
    monkeypatch.setattr(os, "kill", lambda *told: ended.append(told))
    supervised._look_at(node)
    kept.set_flag("kill/0/0")  # as the keeper does after the timeout (test_a_survivor_that_never_arrives_is_left_out)
    assert wait_until(lambda: supervised._flag("kill/0/0"), seconds=20)
    for asked in ([], [signal.SIGUSR1]):  # a run that is asked to stop starts none again
        node.processes, node.exit_code, supervised._requests = process, None, asked
        supervised._pass_on()
        supervised._look_at(node)
        supervised._look_at(node)
        assert (node.exit_code, started) == (137, [node])
    assert ended == [(7, signal.SIGUSR1)]
    waiting.place_in_step, waiting._has_left = sys.exit, True
    never.set()
    for thread in (beating, cutting):
        thread.join(20)


def test_a_signal_to_a_generation_that_was_left_cuts_nothing(waiting):
    waiting._cut_until_left(2)
    assert not waiting.connections.is_cut


def test_a_thread_stands_still_only_while_it_waits_for_others(pipe):
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    waiting = start(lambda: Work.wait(pipe.reading, 1))
    computing, reading = start(compute), start(lambda: os.read(pipe.reading, 1))
    assert wait_until(lambda: (seen := find_standstill(waiting)) is not None and find_standstill(waiting) == seen, seconds=100)
    assert find_standstill(computing) is None and find_standstill(reading) is None
    stop.set()
    os.write(pipe.writing, b"xx")
    waiting.join(20)
    reading.join(20)
    assert find_standstill(waiting) is None


def test_a_thread_between_lines_waits_for_nothing(monkeypatch):
    frame = SimpleNamespace(f_code=member.is_waiting.__code__, f_lineno=None)
    monkeypatch.setattr(sys, "_current_frames", lambda: {None: frame, threading.get_ident(): frame})
    assert find_standstill(threading.current_thread()) is None


def test_a_process_ends_if_it_can_no_longer_listen(monkeypatch):
    """Else it would hear of no loss, and the others would wait for it."""
    port, failures = free_port(), SimpleQueue()
    kept = keep("127.0.0.1", port)
    monkeypatch.setattr(Ledger, "next_signal", lambda *args, **options: 1 / 0)
    environ = {"BRAID_NODE": "0", "BRAID_INCARNATION": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    listening = Member({**environ, "BRAID_ELASTIC_TOKEN": TOKEN}, timeout_seconds=60, ending=SimpleNamespace(fail=failures.put))
    assert isinstance(failures.get(timeout=20), ZeroDivisionError)
    listening.finish()
    del kept


@pytest.fixture
def connect() -> Iterator[Callable[[], list[socket.socket]]]:
    """Open a listening socket and both ends of a connection to it, until the test ends."""
    with ExitStack() as stack:

        def connect() -> list[socket.socket]:
            listening = socket.create_server(("127.0.0.1", 0))
            there = socket.create_connection(listening.getsockname(), timeout=20)
            return [stack.enter_context(each) for each in (listening, listening.accept()[0], there)]

        yield connect


def test_a_cut_ends_what_a_thread_waits_for_and_spares_what_others_opened(connect):
    others, connections = connect(), Connections()
    with connections.opening():
        own = connect()
    received: list[bytes] = []
    thread = start(lambda: received.append(own[2].recv(1)))
    connections.cut()
    thread.join(20)
    assert received == [b""]
    others[1].send(b"x")
    assert others[2].recv(1) == b"x"
    socket.create_connection(own[0].getsockname()).close()  # a listening socket goes on


def test_what_is_opened_after_a_cut_is_cut_as_well(connect):
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


def test_what_is_opened_for_the_next_generation_is_not_cut_by_who_is_late(connect):
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

    def wait(self, *keys: object) -> NoReturn:
        raise RuntimeError(f"left before {keys}")

    get = wait


def test_a_rank_that_waits_to_be_connected_to_by_one_that_has_left_gives_up():
    """Which of the two connects, their addresses decide: in a few tries both cases come up."""
    for number in range(6):
        connections, store = Connections(), dist.PrefixStore(str(number), dist.HashStore())
        with pytest.raises(CutError), connections.opening():
            thread = start(partial(make_group, store, 0))
            make_group(LeavingStore(store), 1)
            asked = partial(lambda cut, lives: cut() or not lives(), connections.cut, thread.is_alive)
            assert wait_until(asked, seconds=100, pause_seconds=0.05), "it waits for a connection"


def test_groups_whose_threads_wait_are_dropped_without_a_wait():
    """gloo waits for its threads when a group is taken down, and one of them for a rank that never takes part."""
    store, groups = dist.HashStore(), dict[int, dist.ProcessGroupGloo]()

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=3))

    for thread in [start(partial(make, rank)) for rank in range(2)]:
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
