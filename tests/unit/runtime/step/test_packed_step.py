"""Every rank works out alike which tokens each holds, takes and gives, from lengths alone."""

import pickle
from dataclasses import replace
from unittest.mock import patch

import pytest

from megatron.runtime.feed.step_planner import StepOptions, plan_step
from megatron.runtime.step.step import FoldedLengths, Step
from megatron.runtime.step.token_placement import WHOLE, ContextSharing
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import DataError
from multimodal.values.sample_lengths import SampleLengths
from tests.distributed.spread_case import build_case, unit_plan

CASE = build_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=3), painter=unit_plan(0, cp=2))
FIRST = MicrobatchPlace("llm", 0, 0)


def plan_on(rank: int, *, knows_starts: bool = True) -> Step:
    lengths = [CASE.source.lengths(index) for index in range(len(CASE.source))]
    if not knows_starts:
        lengths = [replace(sample, item_starts=None) for sample in lengths]
    schedules = ScheduleCache(CASE.graph, CASE.plan, BUILDERS["1f1b"])
    options = StepOptions(schedules, rank=rank, sharing=ContextSharing(block_size=4))
    return plan_step(CASE.source, lengths=lengths, assignment=CASE.assignment, options=options)


def test_lengths_must_say_where_items_begin() -> None:
    with pytest.raises(
        DataError, match=r"sample 0: its lengths have its items begin at tokens \[0, 2, 6\], its text at \[1, 4, "
    ):
        plan_on(0, knows_starts=False)


def test_what_a_loader_worker_worked_out_comes_along() -> None:
    step = pickle.loads(pickle.dumps(plan_on(1)))
    route = step.routes.to_target[FIRST][0]
    known = step.placement.row_shares(route)
    assert known is step.placement.row_shares(route)
    with patch("megatron.runtime.step.token_placement.share_tokens", side_effect=AssertionError("dealt again")):
        assert step.placement.own_share(FIRST, part=WHOLE, rank=2).num_tokens == step.num_tokens_of(FIRST) - sum(
            step.placement.own_share(FIRST, part=WHOLE, rank=rank).num_tokens for rank in (0, 1)
        )


def test_what_a_step_totals_is_packed_with_it() -> None:
    packed = pickle.loads(pickle.dumps(plan_on(1).packed()))
    assert packed.__dict__["num_target_tokens"] == plan_on(1).num_target_tokens


def lengths_of(*sizes: int) -> dict[int, SampleLengths]:
    return {index: SampleLengths(index, (), size, size) for index, size in enumerate(sizes)}


def test_lengths_are_unfolded_when_somebody_asks() -> None:
    lengths = lengths_of(3, 5, 7)
    folded = pickle.loads(pickle.dumps(FoldedLengths(lengths, own=[1])))
    assert len(folded) == 3 and folded[1] == lengths[1] and folded._all is None
    assert folded[2] == lengths[2] and dict(folded) == lengths
