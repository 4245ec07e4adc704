"""Ranks that decided differently stop before the step, all of them, and say where."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.runtime.feed.agreement import Agreed, assignment_digest, check_agreement
from megatron.runtime.launch.stop_requests import StopReason
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError
from tests.distributed.gradient_case import GradientCase, plan_case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_every_builder import MODELS, build_case

CASE = build_case("1f1b", MODELS["two encoders and LLM"])


def agree(case: GradientCase, other: Assignment | None, odd_rank: int) -> str | Agreed:
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
    """The LLM's two replicas exchanged."""
    return Assignment({**assignment.units, "llm": tuple(reversed(assignment.units["llm"]))})


def reversed_inside(assignment: Assignment) -> Assignment:
    """The same places, but the first microbatch's samples in another order."""
    first, *rest = assignment.units["llm"][0]
    return Assignment({**assignment.units, "llm": ((tuple(reversed(first)), *rest), *assignment.units["llm"][1:])})


def test_agreeing_ranks_learn_the_longest_wait_and_the_strongest_reason_to_stop(ranks: RankPool) -> None:
    world_size = CASE.plan.num_ranks
    assert (
        ranks.run(agree, CASE, None, 0, world_size=world_size)
        == [Agreed(0.25 * (world_size - 1), StopReason.SIGTERM)] * world_size
    )


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
def test_every_rank_names_the_first_difference(ranks: RankPool, change, difference) -> None:
    messages = ranks.run(agree, CASE, change(CASE.assignment), 2, world_size=CASE.plan.num_ranks)
    assert len(set(messages)) == 1
    assert re.match(rf"step 3: rank 2 decided otherwise than rank 0: {difference}", messages[0])
