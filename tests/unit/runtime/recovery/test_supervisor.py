"""A supervisor takes over a node that another one has started before, and what forks ranks outlives requests to stop."""

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.runtime.launch.shared_token import read_token
from megatron.runtime.recovery import ledger, supervisor
from megatron.runtime.recovery.ledger import Ledger, keep
from megatron.runtime.recovery.supervisor import Supervisor, main, read_flags
from multimodal.values.errors import ConfigError
from tools.launch import free_port

TOKEN = "known to all of the run"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give supervisors the token."""
    monkeypatch.setenv("BRAID_ELASTIC_TOKEN", TOKEN)


def test_a_node_under_another_supervisor_is_a_new_incarnation() -> None:
    """Signs of life of the old one, and the order to end it, are not taken for those of the new one."""
    port = free_port()
    before = Ledger(keep("127.0.0.1", port), TOKEN.encode())
    before.set_flag("processes/3", "1:40,41")
    flags, command = read_flags(["--nodes", "5", "--node", "3", "--nodes-here", "2", "--port", str(port), "program.py"])
    assert [node.incarnation for node in Supervisor(flags, command)._nodes] == [1, -1]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_store_that_is_gone_or_does_not_answer_ends_the_supervisor_with_a_message(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, thaw = free_port(), threading.Event()
    kept = [keep("127.0.0.1", port)]
    flags, command = read_flags(["--nodes", "1", "--port", str(port), "program.py"])
    supervised = Supervisor(flags, command)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    if is_frozen:
        monkeypatch.setattr(supervised, "_patience_seconds", 0.1)
        monkeypatch.setattr(supervised._ledger, "tell", lambda *args, **values: thaw.wait())
    else:
        monkeypatch.setattr(supervised, "_start", lambda node: supervised._ledger.flag("other"))
        kept.clear()
    assert supervised.run() == 1
    reason = " (the store in which the ranks meet does not answer" if is_frozen else ""
    assert f"the store at 127.0.0.1:{port} is gone{reason}" in capsys.readouterr().err
    thaw.set()


def test_a_request_to_stop_does_not_end_the_process_that_forks_ranks() -> None:
    """Slurm sends it to every process of a step; a rank, which is told so by the supervisor, too, handles it itself."""
    program = """
import os, signal
from megatron.runtime.recovery.preloaded import die_with_supervisor
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
print("alive", flush=True)
die_with_supervisor()
os.kill(os.getpid(), signal.SIGTERM)
print("still alive")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("alive\n", -15), found.stderr


def test_the_store_listens_at_its_address_only() -> None:
    port = free_port()
    kept = keep("127.0.0.1", port)
    socket.create_connection(("127.0.0.1", port), timeout=20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)
    del kept


def test_a_name_that_means_this_machine_only_to_itself_is_listened_to_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian gives a machine's own name 127.0.1.1, where ranks of other machines would look in vain."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: found)
    with ledger._listen("node1", 0) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert "node1 is 127.0.1.1 on this machine" in caplog.text


def test_a_port_that_is_taken_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_supervisors_without_a_common_token_are_told_how_to_make_one(
    flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BRAID_ELASTIC_TOKEN")
    assert main(["--nodes", "2", *flags, "program.py"]) == 2
    message = capsys.readouterr().err
    assert expected in message and "secrets.token_hex()" in message


def test_a_supervisor_alone_makes_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAID_ELASTIC_TOKEN")
    found = [read_flags(["--keeps-store", "--nodes", "2", "program.py"])[0].secret for _ in range(2)]
    assert found[0] != found[1] and min(map(len, found)) >= 32


def test_a_token_in_a_file_is_read_without_space_and_has_no_zeros(tmp_path: Path) -> None:
    path, secret = tmp_path / "token", b"0123456789abcdef"
    for content in (secret + b"\n", secret):
        path.write_bytes(content)
        assert read_token(path, flag="--token") == secret
    path.write_bytes(secret + b"\0" + secret)
    with pytest.raises(ConfigError, match="^--token .*token: the token has 33 bytes, expected at least 16, none zero; make one"):
        read_token(path, flag="--token")


def test_a_store_that_nobody_keeps_is_one_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(supervisor, "open_ledger", lambda *args: ledger.open_ledger(*args, seconds=1))
    port = free_port()
    assert main(["--nodes", "1", "--port", str(port), "program.py"]) == 1
    assert f"supervisor: error: the store at 127.0.0.1:{port} cannot be reached" in capsys.readouterr().err


def test_ranks_may_abort_communicators_without_being_ended_by_torch() -> None:
    flags, command = read_flags(["--nodes", "1", "--port", str(free_port()), "program.py"])
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._flags, supervisor._command = flags, command
    assert supervisor._environment(SimpleNamespace(number=0, incarnation=0), 0)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
