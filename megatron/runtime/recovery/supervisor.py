"""Starts the ranks of nodes, reports deaths at once, and restarts the ranks of a lost node, so that it can return.

`python -m megatron.runtime.recovery.supervisor --nodes 4 --nproc-per-node 2 pretrain_mllm.py --elastic ...` simulates four nodes
on this machine and keeps the store; scripts/slurm/elastic.sh starts one supervisor on each node.
"""

import argparse
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from megatron.runtime.launch.failure import InterruptedRunError, end_process
from megatron.runtime.launch.meeting import ask_within
from megatron.runtime.recovery.keeper import Keeper
from megatron.runtime.recovery.ledger import PATIENCE, PATIENCE_SECONDS, TOKEN_VARIABLE, Ledger, find_token, keep, open_ledger
from multimodal.values.errors import ConfigError, first_line

_LOOK_SECONDS, _WRONG_INPUT = 0.2, 2
_PRELOADED = (
    "megatron.runtime.recovery.preloaded",  # first, as it says which warnings are shown
    "megatron.runtime.flags.cross_checks",
    "megatron.runtime.training.elastic",
    "scipy.optimize",  # a recovery's first use
)
"""Modules imported once before ranks are forked, so that ranks do not wait for imports when nodes start, are lost or return."""
_Answer = TypeVar("_Answer")


@dataclass
class _Node:
    """A node's ranks, in one incarnation after another."""

    number: int
    incarnation: int
    """Number of starts so far, less one."""
    processes: list[BaseProcess] = field(default_factory=list)
    exit_code: int | None = None
    """Set once all of its ranks have ended."""
    return_at: float | None = None


class Supervisor:
    """The nodes that one process looks after."""

    def __init__(self, flags: argparse.Namespace, command: Sequence[str], *, start_method: str = "forkserver") -> None:
        """start_method: `fork`, directly from this process, if it has one thread and has imported the ranks' modules."""
        self._flags, self._command = flags, command
        self._ledger = open_ledger(flags.address, flags.port, flags.secret)
        self._patience_seconds = PATIENCE_SECONDS
        self._nodes = []
        self._requests: list[int] = []  # signals to pass on once no rank is starting, which has no process number yet
        self._has_forked = False
        for number in range(flags.node, flags.node + flags.nodes_here):
            told = self._flag(f"processes/{number}")  # by another supervisor of this node, which has been lost
            self._nodes.append(_Node(number, int(told.partition(":")[0]) if told else -1))
        self._context: Any = multiprocessing.get_context(start_method)
        self._context.set_forkserver_preload(list(_PRELOADED))

    def run(self) -> int:
        """Start all ranks and return when none is left and none will be restarted; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._take)
        try:
            for node in self._nodes:
                self._start(node)
            while any(node.exit_code is None or node.return_at is not None for node in self._nodes):
                wait([process.sentinel for node in self._nodes for process in node.processes], timeout=_LOOK_SECONDS)
                self._pass_on()
                self._patience_seconds = float(self._flag(PATIENCE) or self._patience_seconds)
                for node in self._nodes:
                    self._look_at(node)
        except RuntimeError as problem:
            for process in (process for node in self._nodes for process in node.processes):
                process.kill()
            where = f"{self._flags.address}:{self._flags.port}"
            return _fail(
                f"the store at {where} is gone ({problem}), and the run with it; start it again: it goes on from its newest "
                "checkpoint where --load names the folder of --save"
            )
        except InterruptedRunError as asked:
            with suppress(RuntimeError):
                self._tell("died", node=self._nodes[0].number, incarnation=self._nodes[0].incarnation)
                self._tell("left")
            end_process(_fail(asked, exit_code=asked.exit_code))
        codes = [node.exit_code or 0 for node in self._nodes]
        with suppress(RuntimeError):
            self._tell("left")
        return 0 if 0 in codes else max(codes, default=0)

    def _take(self, number: int, frame: object) -> None:
        if not self._has_forked:  # by a process that imports what ranks need first, which may take long
            raise InterruptedRunError(f"ended by {signal.Signals(number).name} before ranks started", exit_code=128 + number)
        self._requests.append(number)

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Return the store's answer; leaves no thread that asks, as ranks may be forked. RuntimeError if it is gone or frozen."""
        return ask_within(self._patience_seconds, question)

    def _flag(self, name: str) -> str | None:
        return self._ask(lambda: self._ledger.flag(name))

    def _tell(self, kind: str, **values: Any) -> None:
        self._ask(lambda: self._ledger.tell(kind, **values))

    def _start(self, node: _Node) -> None:
        node.incarnation += 1
        node.exit_code = node.return_at = None
        ranks = self._flags.nproc_per_node
        self._tell("started", node=node.number, incarnation=node.incarnation, num_ranks=ranks)
        environments = [self._environment(node, local_rank) for local_rank in range(ranks)]
        node.processes = [self._context.Process(target=_run_rank, args=(list(self._command), each)) for each in environments]
        for process in node.processes:
            process.start()
            self._has_forked = True
        pids = ",".join(str(process.pid) for process in node.processes)
        self._ledger.set_flag(f"processes/{node.number}", f"{node.incarnation}:{pids}")

    def _environment(self, node: _Node, local_rank: int) -> Mapping[str, str]:
        flags = self._flags
        return {
            "RANK": str(node.number * flags.nproc_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(flags.nodes * flags.nproc_per_node),
            "LOCAL_WORLD_SIZE": str(flags.nproc_per_node),
            "MASTER_ADDR": flags.address,
            "MASTER_PORT": str(flags.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"elastic-{flags.address}-{flags.port}",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch ends survivors whose communicators are aborted
            "BRAID_NODE": str(node.number),
            "BRAID_INCARNATION": str(node.incarnation),
            TOKEN_VARIABLE: os.fsdecode(flags.secret),
        }

    def _look_at(self, node: _Node) -> None:
        now = time.monotonic()
        if node.exit_code is not None:
            is_asked = self._flag(f"return/{node.number}/{node.incarnation}") is not None
            if (is_asked or (node.return_at is not None and now >= node.return_at)) and not self._is_over():
                self._start(node)
            elif node.return_at is not None and self._is_over():
                node.return_at = None
            return
        if self._flag(f"kill/{node.number}/{node.incarnation}") is not None:
            self._lose(node, 128 + signal.SIGKILL)
            return
        codes = [process.exitcode for process in node.processes]
        if failed := [code for code in codes if code]:
            self._lose(node, failed[0] if failed[0] > 0 else 128 - failed[0])
        elif all(code == 0 for code in codes):
            node.exit_code, node.processes = 0, []
            self._tell("finished", exit_code=0)

    def _lose(self, node: _Node, exit_code: int) -> None:
        self._tell("died", node=node.number, incarnation=node.incarnation)
        for process in node.processes:
            process.kill()
        for process in node.processes:
            process.join()
        node.exit_code, node.processes = exit_code, []
        if self._flags.return_after is not None and exit_code != _WRONG_INPUT:
            node.return_at = time.monotonic() + self._flags.return_after * 2 ** min(node.incarnation, 10)

    def _is_over(self) -> bool:
        return any(node.exit_code == 0 for node in self._nodes) or self._flag("over") is not None

    def _pass_on(self) -> None:
        while self._requests:
            number, self._flags.return_after = self._requests.pop(0), None
            for node in self._nodes:
                node.return_at = None
                for pid in (process.pid for process in node.processes if process.pid):
                    with suppress(OSError):
                        os.kill(pid, number)


def _run_rank(command: Sequence[str], environment: Mapping[str, str]) -> None:
    from megatron.runtime.recovery.preloaded import die_with_supervisor

    die_with_supervisor()
    multiprocessing.set_start_method("fork", force=True)  # loader workers start as in an ordinary program
    os.environ.update(environment)
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the supervisor's flags, and the program with its own flags; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="elastic.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes that the run starts with")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks of a node, one for each GPU (1)")
    parser.add_argument("--node", type=int, default=0, metavar="I", help="first node of this supervisor, from 0 (0)")
    parser.add_argument("--node-from", metavar="NAME", help="environment variable that says which node it is")
    parser.add_argument("--nodes-here", type=int, metavar="N", help="nodes of this supervisor (all)")
    parser.add_argument("--address", default="127.0.0.1", help="where the store is (this machine)")
    parser.add_argument("--port", type=int, default=29400, help="the store's port (29400)")
    parser.add_argument("--keeps-store", action="store_true", help="keep the store, and decide who is in the run")
    parser.add_argument("--return-after", type=float, metavar="S", help="seconds until a lost node's ranks start again (never)")
    parser.add_argument(
        "--token",
        type=Path,
        metavar="FILE",
        help=f"the run's secret, which all supervisors know (${TOKEN_VARIABLE}; one that is made where there is one supervisor)",
    )
    parser.add_argument("--supervisors", type=int, default=1, metavar="N", help="supervisors in all (1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and its flags; none: keep the store only")
    flags = parser.parse_args(list(argv))
    if flags.node_from is not None:
        flags.node = int(os.environ[flags.node_from])
    flags.nodes_here = flags.nodes if flags.nodes_here is None else flags.nodes_here
    is_alone = flags.keeps_store and bool(flags.command) and flags.supervisors == 1
    flags.secret = find_token(flags.token, os.environ, makes_one=is_alone)
    return flags, flags.command


def _fail(problem: object, *, exit_code: int = 1) -> int:
    print(f"supervisor: error: {problem}", file=sys.stderr)
    return exit_code


def main(argv: Sequence[str]) -> int:
    """Run a supervisor; returns its exit code."""
    try:
        flags, command = read_flags(argv)
        if not command:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks that are asked to stop need the store while they save
        keeps: Thread | None = None
        if flags.keeps_store:
            keeper = Keeper(Ledger(keep(flags.address, flags.port), flags.secret), num_nodes=flags.nodes)
            keeps = Thread(target=keeper.run, kwargs={"num_supervisors": flags.supervisors}, daemon=True)
            keeps.start()
    except ConfigError as problem:
        return _fail(problem, exit_code=_WRONG_INPUT)
    try:
        code = Supervisor(flags, command).run() if command else 0
    except RuntimeError as problem:
        return _fail(
            f"the store at {flags.address}:{flags.port} cannot be reached ({first_line(problem)}); "
            "does the supervisor that keeps it (--keeps-store) run there?"
        )
    if keeps is not None:  # until the run is over and supervisors have left
        keeps.join()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
