"""Runs whose ranks are killed go on in the processes that are left, and log what a run logs in which nothing happened."""

import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.nccl_replay import hosts_of, run_kernels
from benchmarks.recorded_calls import EventKind
from megatron.runtime.recovery.ledger import Ledger, connect
from tests.distributed.conftest import Once
from tests.distributed.elastic_run import ElasticRun, Nodes, read_losses
from tests.distributed.happenings import HAPPENINGS
from tests.distributed.launch import HANG_SECONDS
from tests.distributed.recorded_nodes import CALLS, read_calls
from tests.distributed.small_run import train

NUM_STEPS, BATCH = 14, 6


@pytest.fixture
def inputs(once: Once) -> Path:
    """Return the folder of the inputs of all runs, with the log of one process that nothing happens to."""
    return once(train_undisturbed)


def train_undisturbed(folder: Path) -> Path:
    train(folder, {"--global-batch-size": BATCH, "--train-iters": NUM_STEPS})
    return folder


@contextmanager
def running(
    folder: Path, inputs: Path, nodes: Nodes, *, happenings: str = "", environment: dict[str, str] | None = None, **how: Any
) -> Iterator[ElasticRun]:
    """Start a run to whose ranks something happens, and end it in any case."""
    given = {"num_steps": NUM_STEPS, "batch": BATCH, "is_new_program": False, **how}
    given["flags"] = ("--elastic-timeout", HANG_SECONDS, *how.get("flags", ()))  # a slow machine loses no node that lives
    run = ElasticRun(folder, nodes, inputs=inputs, environment={HAPPENINGS: happenings, **(environment or {})}, **given)
    try:
        yield run
    finally:
        run.close()


def check(run: ElasticRun, inputs: Path) -> str:
    """Wait for the end and compare the losses; returns what the run printed."""
    assert run.wait() == 0, run.output
    expected, found = read_losses(inputs), run.losses()
    assert list(found) == list(range(1, NUM_STEPS + 1)), "no step is lost or repeated"
    assert np.allclose(list(found.values()), list(expected.values()), rtol=0, atol=1e-9)
    return run.output


def test_ranks_die_anywhere_and_nodes_return(tmp_path: Path, inputs: Path) -> None:
    """In a forward; the first rank, once it knows the norm that others wait for; in the recovery from that; in a reduction.

    In the last one a survivor waits for a message that its connections' end does not end: it goes on in the same process.
    """
    happenings = "3:forward:3:KILL all:step:5:JOIN3 0:norm:6:KILL 2:copy:6:KILL"
    happenings += " 4:reduction:10:KILL 5:reduction:10:WAIT all:step:12:JOIN0"
    flags, environment = ("--balance", "disttrain", "--measure-interval", 4), {CALLS: str(tmp_path)}
    with running(tmp_path, inputs, Nodes(6), happenings=happenings, environment=environment, flags=flags) as run:
        run.wait_for_step(4)
        waiting = run.processes(5)
        run.wait_for_step(11)
        assert run.processes(5) == waiting
        output = check(run, inputs)
    assert_recorded_calls_end(tmp_path, 6)
    assert output.count("goes on after step") >= 4
    assert output.count("left behind") == 1
    assert output.count("layers measured up to this step") >= 1, "after 4 or 8 steps, which later ranks take over"
    assert "1 node may be lost at once, down to 2; 6 replicas each keep all of the optimizer state" in output


def assert_recorded_calls_end(folder: Path, num_nodes: int) -> None:
    """With NCCL, whose communicators are aborted where gloo's connections are cut."""
    recorded = read_calls(folder, num_nodes)
    kinds = Counter(event.kind for events in recorded for event in events)
    assert kinds[EventKind.ABORT] >= 4 and kinds[EventKind.CALL] > 500
    for num_queues in (1, 33):
        hosts = hosts_of(recorded, creates_lazily=False)
        assert not run_kernels(hosts, num_queues=num_queues).stuck


@pytest.mark.deep
def test_replicas_that_differ_become_alike_and_differ_again(tmp_path: Path, inputs: Path) -> None:
    """Pipelines of two and three nodes; without one node there are two of two.

    The second time, all ranks have updated, and the first one has not reported.
    """
    nodes = Nodes(5, sizes=(2, 3), replicas=(2, 3))
    with running(tmp_path, inputs, nodes, happenings="4:forward:4:KILL all:step:6:JOIN4 0:report:13:KILL") as run:
        output = check(run, inputs)
    assert output.count("with 4 nodes") >= 2


@pytest.mark.deep
def test_more_losses_than_copies_go_back_to_the_newest_checkpoint(tmp_path: Path, inputs: Path) -> None:
    """One replica over two nodes of two ranks: half of the state is lost with any rank, as a node dies as one."""
    flags = ("--save", tmp_path / "saved", "--save-interval", 4)
    nodes = Nodes(2, gpus=2, fault_tolerance=0, sizes=(2,))
    with running(tmp_path, inputs, nodes, flags=flags, happenings="0:forward:7:KILL 1:forward:7:KILL") as run:
        run.wait_until(lambda: "waiting: 1 nodes are left" in run.output, "wait for nodes")
        run.let_return(0)
        assert "going back to a checkpoint" in check(run, inputs)


GREETING = (0x3C85F7CE).to_bytes(4, "little")
"""Of torch's store."""
NOISE = (
    *(
        b"",
        b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        b"\0" * 4096,
        b"\xff" * 4096,
        GREETING[:3],
        GREETING + bytes(range(256)) * 4,
    ),
    GREETING + b"\0" + (2**40).to_bytes(8, "little") + b"a key that is never sent whole",
)


@pytest.mark.deep
def test_strangers_end_nothing_and_a_frozen_store_ends_all_with_a_message(tmp_path: Path, inputs: Path) -> None:
    """Strangers reach the store, stay there, and say noise, that the run is over, and what no program can read."""
    with running(tmp_path, inputs, Nodes(3), num_steps=10**5, flags=("--elastic-timeout", 5), is_new_program=True) as run:
        run.wait_for_step(1)
        peers = [socket.create_connection(("127.0.0.1", run.port), timeout=20) for _ in range(50 * len(NOISE))]
        for peer, noise in zip(peers, 50 * NOISE, strict=True):
            with suppress(OSError):
                peer.sendall(noise)
        store = connect("127.0.0.1", run.port)
        Ledger(store, b"a stranger's guess").tell("finished", exit_code=0)
        store.set(f"recovery/event/{store.add('recovery/events', 1) - 1}", b"\xff{no JSON")
        store.set("recovery/flag/failed", "0")
        store.set("recovery/signal/1/0", '"over:0"')
        run.kill(1)
        run.wait_until(lambda: "with 2 nodes" in run.output, "recovery")
        run.freeze_store()
        message = f"the store at 127.0.0.1:{run.port}, which outlives all ranks, has not answered for 6 s (--elastic-timeout)"
        run.wait_until(lambda: run.output.count(message) == 2, "end of both ranks", seconds=120)
        run.freeze_store(signal.SIGCONT)
        assert run.wait() == 128 + signal.SIGKILL, "that of the node that was killed"
        for peer in peers:
            peer.close()
