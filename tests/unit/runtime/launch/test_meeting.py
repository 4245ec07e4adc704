"""Ranks that meet in a store: who failed first, who still answers, whether all were told the same; and how runs end early."""

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.runtime.launch import failure
from megatron.runtime.launch import meeting as meeting_module
from megatron.runtime.launch.distributed_setup import World, agree_on_start
from megatron.runtime.launch.meeting import Meeting, ask_within, open_meeting
from megatron.runtime.launch.rank_place import RankPlace, StoreGoneError, find_rank_place
from multimodal.values.errors import ConfigError

NUM_RANKS = 3


@pytest.fixture(scope="module")
def connected() -> list[Meeting]:
    place = RankPlace(0, NUM_RANKS, 0, "127.0.0.1", 0, launcher_keeps_store=False)
    first = open_meeting(place, seconds=10)
    port = first.store.underlying_store.port  # type: ignore[attr-defined]
    return [first, *(open_meeting(replace(place, rank=rank, port=port), seconds=10) for rank in range(1, NUM_RANKS))]


@pytest.fixture(autouse=True)
def short_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.runtime.launch.failure._ROLL_CALL_SECONDS", 0.1)


@pytest.fixture
def meetings(connected: list[Meeting], request: pytest.FixtureRequest) -> list[Meeting]:
    """The same ranks, whose store is empty."""

    def emptied(meeting: Meeting) -> Meeting:
        store, line = (PrefixStore(request.node.nodeid, each) for each in (meeting.store, meeting.line))
        opened: Future[Store] = Future()
        opened.set_result(line)
        return replace(meeting, store=store, opened_line=opened)

    return [emptied(meeting) for meeting in connected]


def test_one_rank_fails_first(meetings):
    assert [meeting.claim_failure() for meeting in meetings] == [True, False, False]
    assert meetings[2].wait_for_failure(seconds=0) is None
    meetings[0].announce_failure(2)
    assert [meeting.wait_for_failure(seconds=5) for meeting in meetings] == [2, 2, 2]


def test_a_rank_of_another_run_is_refused(connected):
    with pytest.raises(StoreGoneError, match="already has a rank 1, so it belongs to another run; choose another MASTER_PORT"):
        open_meeting(connected[1].place, seconds=10)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = RankPlace(0, 2, 0, "127.0.0.1", taken.getsockname()[1], launcher_keeps_store=False)
        with pytest.raises(StoreGoneError, match=r"rank 0 cannot keep the store at .*in use.* check MASTER_ADDR and MASTER_PORT"):
            open_meeting(place, seconds=1)


def test_nobody_to_meet_is_named():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(StoreGoneError, match=rf"rank 1 waited 0 s for rank 0 at 127.0.0.1:{port} .* was it started"):
        open_meeting(RankPlace(1, 2, 1, "127.0.0.1", port, launcher_keeps_store=False), seconds=0.1)


def test_the_keeper_of_the_store_leaves_last(meetings):
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(meetings[0].leave, seconds=30)
        meetings[1].leave(seconds=30)
        assert not leaving.done()
        meetings[2].leave(seconds=30)
        leaving.result()


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (
            "Connection closed by peer [127.0.0.1]:4022",
            "rank 0 lost its connection to rank 2, which no longer answers: frozen, killed",
        ),
        (
            "Timed out waiting 1000ms for recv",
            "rank 0 waited longer than --distributed-timeout-minutes for rank 2, which no longer",
        ),
    ],
)
def test_a_lost_rank_is_named(meetings, problem, says):
    meetings[1].answer_roll("broker.py:1 wait")
    explained = failure.explain_lost_ranks(RuntimeError(problem), meetings[0])
    assert str(explained).startswith(says)
    assert meetings[1].roll_is_called()
    assert problem in str(explained)


def test_a_hang_tells_what_every_rank_does(meetings):
    for meeting in meetings[1:]:
        meeting.answer_roll(f"broker.py:{meeting.place.rank} wait")
    explained = str(failure.explain_lost_ranks(RuntimeError("Timed out waiting 1000ms for recv"), meetings[0]))
    assert "a fault in Braid" in explained
    assert "rank 1: broker.py:1 wait\n  rank 2: broker.py:2 wait" in explained


def test_a_lost_loader_process_is_told_and_another_error_is_left_as_it_is(meetings):
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert "rank 0 lost a process that loads its data: " in str(failure.explain_lost_ranks(killed, meetings[0]))
    problem = RuntimeError("Caught RuntimeError in DataLoader worker process 0.: mat1 and mat2 shapes cannot be multiplied")
    assert failure.explain_lost_ranks(problem, meetings[0]) is problem


def test_a_store_that_does_not_answer_is_not_waited_for():
    answer = Event()
    with pytest.raises(StoreGoneError):
        ask_within(0.05, answer.wait)
    answer.set()


def test_ranks_that_do_not_come_are_named(meetings):
    values = {"flags": {"seed": "with --seed 1"}}
    meetings[1].store.set("start/1", "agreed")
    with pytest.raises(failure.RanksLostError) as raised:
        agree_on_start(meetings[0], values, timeout_seconds=0.5)
    assert str(raised.value).startswith("rank 0 waited in vain for rank 2 to start (--distributed-timeout-minutes)")


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    alone = RankPlace(0, 1, 0, "127.0.0.1", 0, launcher_keeps_store=False)
    assert find_rank_place({}) == find_rank_place({"PMI_SIZE": "1"}) == alone
    assert find_rank_place({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8"}).size == 8, "srun starts a torchrun on each node"
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE is 2 and WORLD_SIZE is not set"):
        find_rank_place({"OMPI_COMM_WORLD_SIZE": "2"})
    monkeypatch.setattr(failure.os, "environ", {"OMPI_COMM_WORLD_SIZE": "2"})
    assert failure._place_or_guess().size == 1, "it would wait for others that do not come before it ends"


def test_a_failure_waits_for_a_slow_connection(meetings, monkeypatch):
    """Or the others would never learn of it: longer than for an answer, and the connection opens only once it is waited for."""
    opened: Future[Store] = Future()
    patience: list[float] = []

    def ask(seconds: float, question: Callable[[], object]) -> object:
        if not patience:
            opened.set_result(meetings[1].line)
        patience.append(seconds)
        return question()

    monkeypatch.setattr(meeting_module, "ask_within", ask)
    assert replace(meetings[1], opened_line=opened).claim_failure()
    assert patience[0] > patience[1]


def test_ranks_of_a_node_take_turns_after_rank_0(meetings):
    order: list[int] = []
    watch: Any = None

    def enter(rank: int) -> None:
        world = World(rank, NUM_RANKS, meetings[rank], timedelta(seconds=10), watch)
        with world.in_turn("index"):
            order.append(rank)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for done in [pool.submit(enter, rank) for rank in (2, 1, 0)]:
            done.result(30)
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


class RecordedEnding(failure.Ending):
    def __init__(self) -> None:
        super().__init__()
        self.problems: list[failure.InterruptedRunError] = []

    def fail(self, problem: BaseException) -> None:  # type: ignore[override]
        assert isinstance(problem, failure.InterruptedRunError)
        self.problems.append(problem)


@pytest.mark.parametrize(
    ("is_training", "signals", "ends", "reason"),
    [
        (False, {0: signal.SIGTERM}, ("ended by SIGTERM before training", 143), failure.StopReason.NONE),
        (True, {}, None, failure.StopReason.NONE),
        (True, {0: signal.SIGTERM, 1: signal.SIGTERM}, None, failure.StopReason.SIGTERM),  # the same, from srun and from torchrun
        (True, {0: signal.SIGTERM, 60: signal.SIGTERM}, ("ended by SIGTERM while training", 143), failure.StopReason.SIGTERM),
        (True, {0: signal.SIGINT}, ("ended by SIGINT while training", 130), failure.StopReason.NONE),
        (True, {0: signal.SIGUSR1, 1: None}, ("ended by SIGUSR1 while it waited for nodes", 138), failure.StopReason.SIGUSR1),
    ],
)
def test_what_signals_end_and_what_they_ask_for(is_training, signals, ends, reason, monkeypatch):
    """signals: by the second in which they come, None: nodes are lacking; ends: what ends the process, and its exit code."""
    ending, now = RecordedEnding(), time.monotonic()
    requests = failure.StopRequests(ending)
    if is_training:
        requests.is_training = True
    for second, number in signals.items():
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        requests.wait_for_nodes() if number is None else requests.take(number)
    assert [(str(problem), problem.exit_code) for problem in ending.problems] == ([ends] if ends else [])
    assert requests.reason(exit_duration_minutes=None) is reason


def test_a_time_limit_is_reached(monkeypatch):
    requests, now = failure.StopRequests(RecordedEnding()), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 119.0)
    assert requests.reason(exit_duration_minutes=2) is failure.StopReason.NONE
    monkeypatch.setattr(time, "monotonic", lambda: now + 121.0)
    assert requests.reason(exit_duration_minutes=2) is failure.StopReason.DURATION


def test_torchrun_ends_with_the_message_of_the_rank_that_failed_first(tmp_path, monkeypatch, capsys):
    for rank in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        if rank == 1:
            failure.report(ConfigError("--lr is missing"), rank)
        else:
            failure.tell_launcher("ended because another rank failed", seconds_later=1)
    failures = {rank: ProcessFailure(rank, 7, 2, str(tmp_path / f"{rank}.json")) for rank in (0, 1)}
    before, _, behind = str(ChildFailedError("pretrain_mllm.py", failures)).partition("Root Cause")
    assert "traceback : ended because another rank failed" in before
    assert behind.strip("=\n").endswith("traceback : ConfigError: --lr is missing")
    assert capsys.readouterr().err == "pretrain_mllm.py: error: --lr is missing [ConfigError, rank 1]\n"
