"""A supervisor takes over a node that another one has started before, and what forks ranks outlives requests to stop."""

import subprocess
import sys

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
