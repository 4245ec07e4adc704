"""A supervisor takes over a node that another one has started before, and what forks ranks outlives requests to stop."""

import signal
import subprocess
import sys

import pytest
from torch.distributed import PrefixStore

from megatron.runtime.recovery.ledger import Ledger, connect
from megatron.runtime.recovery.supervisor import Supervisor, read_flags
from tests.distributed.launch import free_port


def test_a_node_under_another_supervisor_is_a_new_incarnation() -> None:
    """Signs of life of the old one, and the order to end it, are not taken for those of the new one."""
    port = free_port()
    ledger = Ledger(PrefixStore("recovery", connect("127.0.0.1", port, keeps=True)))
    ledger.set_flag("processes/3", "1:40,41")
    flags, command = read_flags(["--nodes", "5", "--node", "3", "--nodes-here", "2", "--port", str(port), "program.py"])
    assert [node.incarnation for node in Supervisor(flags, command)._nodes] == [1, -1]


def test_a_store_that_is_gone_ends_the_supervisor_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    kept = connect("127.0.0.1", port, keeps=True)
    flags, command = read_flags(["--nodes", "1", "--port", str(port), "program.py"])
    found = Supervisor(flags, command)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(found, "_start", lambda node: found._ledger.flag("other"))
    del kept
    assert found.run() == 1
    assert f"the store at 127.0.0.1:{port} is gone" in capsys.readouterr().err


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
