"""What real runs call on each rank, replayed as NCCL would have it: in hardware queues, by kernels that wait for peers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.nccl_replay import Replayed, hosts_of, run_kernels
from benchmarks.recorded_calls import Call, EventKind, Recorded, recording_calls
from tests.distributed import test_plan_change, test_reduce_by_layer
from tests.distributed.gradient_case import run_on_rank
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_inside_waits import PAIRS
from tests.distributed.test_inside_waits import build_case as build_inside
from tests.distributed.training_case import TrainingCase

NUM_MULTIPROCESSORS = 132
BLOCKS_OF_CALL = 24
"""An H100's multiprocessors, and those that a call of NCCL may hold."""


def plan_changes(name: str) -> tuple[TrainingCase, Any, int]:
    graph, sizes = test_plan_change.CHANGES[name]
    plans = test_plan_change.plans_of(graph, sizes)
    return TrainingCase(graph, plans[0], shards_weights=name == test_plan_change.SHARDED), plans, 1


RUNS: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "reductions inside backwards": (7, run_on_rank, (test_reduce_by_layer.build_case("1f1b", num_stages=2),)),
    "collectives that are held back": (4, run_on_rank, (build_inside(2, PAIRS, sequence_parallel=True),)),
    **{
        name: (max(plan.num_ranks for plan in plan_changes(name)[1]), test_plan_change.train, plan_changes(name))
        for name in test_plan_change.CHANGES
    },
}


def record(function: Callable[..., Any], *args: Any) -> Recorded:
    with recording_calls() as events:
        function(*args)
    return events


@pytest.mark.deep(when=lambda name: name in test_plan_change.CHANGES and name != test_plan_change.SHARDED)
@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_calls_ends_with_nccl(ranks: RankPool, name: str) -> None:
    num_ranks, function, given = RUNS[name]
    recorded = ranks.run(record, function, *given, world_size=num_ranks)
    calls = [event.call for events in recorded for event in events if event.kind is EventKind.CALL]
    assert any(call.messages for call in calls) and any(not call.messages for call in calls)
    for num_queues, creates_lazily in itertools.product((1, 2, 8, 33), (False, True)):
        stuck, seconds = replayed(recorded, num_queues=num_queues, creates_lazily=creates_lazily)
        assert not stuck, (num_queues, creates_lazily, stuck)
        assert seconds >= max(sum(event.seconds for event in events) for events in recorded) * (1 - 1e-9)


def replayed(
    recorded: Sequence[Recorded], *, num_queues: int = 33, creates_lazily: bool = False, blocks: int = BLOCKS_OF_CALL
) -> Replayed:
    hosts = hosts_of(recorded, creates_lazily=creates_lazily, blocks_of_call=blocks, bytes_per_second=5e10)
    return run_kernels(hosts, num_queues=num_queues, num_blocks=NUM_MULTIPROCESSORS)


@pytest.fixture(scope="module")
def recorded(ranks: RankPool) -> list[Recorded]:
    num_ranks, function, given = RUNS["collectives that are held back"]
    return ranks.run(record, function, *given, world_size=num_ranks)


def collectives_of(events: Recorded) -> list[tuple[int, Call]]:
    """With their places."""
    return [(place, event.call) for place, event in enumerate(events) if event.kind is EventKind.CALL and not event.call.messages]


def test_a_receive_that_is_waited_for_before_its_sender_can_send_is_stuck(recorded: list[Recorded]) -> None:
    """The last one of rank 0, of a gradient of what it sends first."""
    last = max(event.number for event in recorded[0] if event.call.messages and not event.call.messages[0][1])
    early = [event for event in recorded[0] if event.number == last]
    assert [event.kind for event in early] == [EventKind.CALL, EventKind.WAIT]
    stuck = replayed([[*early, *(event for event in recorded[0] if event.number != last)], *recorded[1:]]).stuck
    assert 0 in stuck and len(stuck) > 1


def test_calls_of_one_group_that_are_not_alike_are_named(recorded: list[Recorded]) -> None:
    places = collectives_of(recorded[0])
    first, second = next(
        (one, other)
        for (one, call), (other, next_call) in itertools.combinations(places, 2)
        if call.communicator == next_call.communicator and not call.is_alike(next_call) and len(call.ranks) > 1
    )
    swapped = list(recorded[0])
    for place, other in ((first, second), (second, first)):
        swapped[place] = swapped[place]._replace(call=recorded[0][other].call)
    with pytest.raises(ValueError, match=r"^rank 0: .* bytes, group .*; rank \d: .* bytes, group"):
        replayed([swapped, *recorded[1:]])


def test_calls_that_hold_all_multiprocessors_while_they_wait_are_stuck(recorded: list[Recorded]) -> None:
    assert replayed(recorded, blocks=NUM_MULTIPROCESSORS).stuck
