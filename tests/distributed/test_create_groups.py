"""Groups whose connecting fails on one rank are made once more, by all ranks; a rank that is gone ends all."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.communication import create_groups
from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.feed.agreement import assignment_digest, check_agreement
from megatron.runtime.launch.failure import StopReason
from megatron.runtime.launch.meeting import wait_until
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError
from tests.distributed.gradient_case import GradientCase, plan_case
from tests.distributed.happenings import HAPPENINGS
from tests.distributed.launch import HANG_SECONDS, REPOSITORY, Forked, as_arguments, read_log
from tests.distributed.rank_pool import TIMEOUT
from tests.distributed.small_run import working_flags, write_working_files
from tests.distributed.test_every_builder import MODELS, build_case
from tools.launch import free_port

WORLD_SIZE = 4
RANK_SETS = ((0, 1, 2, 3), (0, 2), (1, 3), (3,))
PATIENCE = timedelta(seconds=2)
"""For a peer that has failed; the others of an attempt wait for it so long."""


def interrupted(original: Callable[..., Any], *, at_calls: tuple[int, ...]) -> Callable[..., Any]:
    """A function that fails, as gloo does, at some of its calls."""
    count = 0

    def call(*args: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count - 1 in at_calls:
            raise RuntimeError("Gloo connectFullMesh failed with Connection closed by peer\nframe #0")
        return original(*args, **keywords)

    return call


def sums(groups: list[dist.ProcessGroup]) -> list[float]:
    """Return the sum of the ranks of each group's members, as the group computes it."""
    found = []
    for group, ranks in zip(groups, RANK_SETS, strict=True):
        if dist.get_rank() in ranks:
            assert gather_objects(str(dist.get_rank()), group=group) == [*map(str, ranks)], "one of each, and no others"
            number = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(number, group=group)
            found.append(float(number))
    return found


def make_groups(failing_rank: int, at_calls: tuple[int, ...]) -> tuple[list[float], list[str]]:
    """Make all groups, and another one after them; returns what their members add up, and the names of all."""
    at_calls = at_calls if dist.get_rank() == failing_rank else ()
    with (
        mock.patch.object(create_groups, "FIRST_PATIENCE", PATIENCE),
        mock.patch.object(dist, "new_group", interrupted(dist.new_group, at_calls=at_calls)),
    ):
        groups = create_groups.create_groups(RANK_SETS, timeout=TIMEOUT)
        again = create_groups.create_groups([range(WORLD_SIZE)], timeout=TIMEOUT)
    found = sums(groups)
    dist.barrier(again[0])
    names = [group.group_name for group in dist.distributed_c10d._world.pg_map]
    return found, names[:2] + names[-1:]


def connect_again(store: str, failing_rank: int) -> float:
    """Connect the world anew, for which one rank needs two attempts; returns what all ranks add up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    at_calls = (0,) if rank == failing_rank else ()
    with (
        mock.patch.object(create_groups, "FIRST_PATIENCE", PATIENCE),
        mock.patch.object(dist, "init_process_group", interrupted(dist.init_process_group, at_calls=at_calls)),
    ):
        file_store = dist.FileStore(store, world_size)
        create_groups.connect_world("gloo", store=file_store, rank=rank, size=world_size, timeout=TIMEOUT)
    number = torch.tensor(float(rank))
    dist.all_reduce(number, group=create_groups.create_groups([range(world_size)], timeout=TIMEOUT)[0])
    return float(number)


def fail_to_make_groups() -> str:
    at_calls = (0, 1) if dist.get_rank() == 2 else ()
    with (
        mock.patch.object(create_groups, "FIRST_PATIENCE", PATIENCE),
        mock.patch.object(create_groups, "NUM_ATTEMPTS", 2),
        mock.patch.object(dist, "new_group", interrupted(dist.new_group, at_calls=at_calls)),
        pytest.raises(RuntimeError) as problem,
    ):
        create_groups.create_groups([range(WORLD_SIZE)], timeout=TIMEOUT)
    return str(problem.value)


@pytest.mark.parametrize("at_calls", [(), (1,), (2, 5)], ids=str)
def test_all_ranks_make_groups_again_after_one_failed(ranks, at_calls):
    answers = ranks.run(make_groups, 1, at_calls, world_size=WORLD_SIZE)
    assert [found for found, _ in answers] == [[6.0, 2.0], [6.0, 4.0], [6.0, 2.0], [6.0, 4.0, 3.0]]
    assert len({tuple(names) for _, names in answers}) == 1


def test_all_ranks_connect_the_world_again_after_one_failed(ranks, tmp_path):
    assert ranks.run(connect_again, str(tmp_path / "store"), 0, world_size=WORLD_SIZE) == [6.0] * WORLD_SIZE


def test_all_ranks_give_up_together(ranks):
    (told,) = set(ranks.run(fail_to_make_groups, world_size=WORLD_SIZE))
    failed = "Gloo connectFullMesh failed with Connection closed by peer"
    assert told == f"the ranks could not connect to each other in 2 attempts (rank 2: {failed})"


def test_groups_of_nccl_are_told_what_is_urgent_and_what_they_may_hold(monkeypatch):
    made: list[tuple[list[int], Any]] = []

    def options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(is_urgent=is_high_priority_stream, config=SimpleNamespace(max_ctas=32))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options, **_: made.append((ranks, pg_options)))
    create_groups.create_groups([(0, 1), (2, 3)], timeout=TIMEOUT, backend="nccl", urgent=[(2, 3)])
    create_groups.create_groups([range(4)], timeout=TIMEOUT, backend="nccl", most_blocks=8)
    assert [(ranks, each.is_urgent, each.config.max_ctas) for ranks, each in made] == [
        *(([0, 1], False, 32), ([2, 3], True, 32), ([0, 1, 2, 3], False, 8))
    ]


CASE = build_case("1f1b", MODELS["two encoders and LLM"])


def agree(case: GradientCase, other: Assignment | None, odd_rank: int) -> str | tuple[float, StopReason]:
    """Check a step that one rank plans otherwise and rank 1 wants to stop at; returns the message, or what was agreed."""
    rank = dist.get_rank()
    step = plan_case(case)
    if other is not None and rank == odd_rank:
        step = replace(step, assignment=other, digest=assignment_digest(other))
    try:
        stop = StopReason.SIGTERM if rank == 1 else StopReason.DURATION
        return check_agreement(step, number=3, wait_seconds=0.25 * rank, stop=stop, device=torch.device("cpu"))
    except AssignmentError as problem:
        return str(problem)


def swapped(assignment: Assignment) -> Assignment:
    return Assignment({**assignment.units, "llm": tuple(reversed(assignment.units["llm"]))})


def reversed_inside(assignment: Assignment) -> Assignment:
    """The same places, but the first microbatch's samples in another order."""
    first, *rest = assignment.units["llm"][0]
    return Assignment({**assignment.units, "llm": ((tuple(reversed(first)), *rest), *assignment.units["llm"][1:])})


def test_agreeing_ranks_learn_the_longest_wait_and_the_strongest_reason_to_stop(ranks):
    world_size = CASE.plan.num_ranks
    assert ranks.run(agree, CASE, None, 0, world_size=world_size) == [(0.25 * (world_size - 1), StopReason.SIGTERM)] * world_size


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            swapped,
            "unit 'llm', sample 0 is in replica 1, microbatch 0, at 0 there and in replica 0, microbatch 0, at 0 on rank 0",
        ),
        (reversed_inside, "unit 'llm', sample 0 is in replica 0, microbatch 0, at 1 there"),
    ],
)
def test_every_rank_names_the_first_difference(ranks, change, difference):
    messages = ranks.run(agree, CASE, change(CASE.assignment), 2, world_size=CASE.plan.num_ranks)
    assert len(set(messages)) == 1
    assert re.match(rf"step 3: rank 2 decided otherwise than rank 0: {difference}", messages[0])


@pytest.mark.deep(when=lambda more: more != ())
@pytest.mark.parametrize("more", [(), ("--max-restarts", 0)], ids=["forked", "by torchrun"])
def test_a_failed_run_ends_in_one_line_and_with_its_own_exit_code(tmp_path, more):
    place = ("--nproc-per-node", 2, "--master-port", free_port(), *more, REPOSITORY / "pretrain_mllm.py")
    launcher = Forked("tools/launch.py", [*map(str, place), "--lr", "high"], folder=tmp_path, output=tmp_path / "output")
    assert launcher.wait(HANG_SECONDS) == 2
    assert launcher.said == "pretrain_mllm.py: error: argument --lr: expected a number, found 'high' [ConfigError, rank 0]\n"


@pytest.mark.parametrize(
    ("victim", "exit_code", "said"),
    [("launcher", 0, "stopped by SIGTERM after step"), ("rank", 137, "rank 0 lost its connection to rank 1")],
)
def test_signals_reach_ranks_and_a_killed_rank_ends_the_run(tmp_path, victim, exit_code, said):
    write_working_files(tmp_path)
    log = tmp_path / "log.jsonl"
    flags = {**working_flags(tmp_path), "--train-iters": 10**6, "--log-json": log}
    place = ("--nproc-per-node", 2, "--master-port", free_port(), REPOSITORY / "pretrain_mllm.py")
    happenings = {HAPPENINGS: "1:forward:2:KILL"} if victim == "rank" else {}
    words = [*map(str, (*place, *as_arguments(flags)))]
    launcher = Forked("tools/launch.py", words, happenings, output=tmp_path / "output")
    try:
        if victim == "launcher":
            assert wait_until(lambda: read_log(log), seconds=HANG_SECONDS)
            os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(HANG_SECONDS) == exit_code, launcher.said
    finally:
        launcher.kill()
    assert said in launcher.said, launcher.said
