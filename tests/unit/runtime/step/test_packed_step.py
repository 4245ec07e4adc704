"""Every rank works out alike which tokens each holds, takes and gives, from lengths alone."""

import pickle
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron.runtime.execution.step_messages import StepInputs
from megatron.runtime.feed.step_planner import StepOptions, plan_step
from megatron.runtime.step.step import ROUTES, FoldedLengths, Step
from megatron.runtime.step.token_placement import WHOLE, ContextSharing
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import DataError
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from tests.distributed.gradient_case import plan_all
from tests.distributed.spread_case import build_case, unit_plan

CASE = build_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=3), painter=unit_plan(0, cp=2))
FIRST = MicrobatchPlace("llm", 0, 0)


def plan_on(rank: int, *, knows_starts: bool = True, plan: Plan = CASE.plan) -> Step:
    lengths = [CASE.source.lengths(index) for index in range(len(CASE.source))]
    if not knows_starts:
        lengths = [replace(sample, item_starts=None) for sample in lengths]
    return plan_step(
        CASE.source,
        lengths=lengths,
        assignment=CASE.assignment,
        options=StepOptions(ScheduleCache(CASE.graph, plan, BUILDERS["1f1b"]), rank=rank, sharing=ContextSharing(block_size=4)),
    )


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


CPU = torch.device("cpu")


def plan_on_rank_0() -> Step:
    case = build_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=3), painter=unit_plan(0, cp=2))
    options = StepOptions(
        ScheduleCache(case.graph, case.plan, BUILDERS["1f1b"]),
        rank=0,
        sharing=ContextSharing(block_size=4),
        build=BuildOptions(Precision(torch.float64), attention_backend="blocks"),
    )
    return plan_all(case.source, case.assignment, options)


def lengths_of(*sizes: int) -> dict[int, SampleLengths]:
    return {index: SampleLengths(index, (), size, size) for index, size in enumerate(sizes)}


def test_lengths_are_unfolded_when_somebody_asks() -> None:
    lengths = lengths_of(3, 5, 7)
    folded = pickle.loads(pickle.dumps(FoldedLengths(lengths, own=[1])))
    assert len(folded) == 3 and folded[1] == lengths[1] and folded._all is None
    assert folded[2] == lengths[2] and dict(folded) == lengths


def test_a_packed_step_gives_what_the_step_gave() -> None:
    step = plan_on_rank_0()
    packed = pickle.loads(pickle.dumps(step.packed()))
    assert not packed.inputs and set(packed.parcels) == {ROUTES, *step.inputs}
    assert packed.__dict__["num_target_tokens"] == step.num_target_tokens, "it is not added up again"
    assert packed.num_tokens == step.num_tokens and dict(packed.lengths) == dict(step.lengths)
    here, there = (StepInputs(each, rank=0, device=CPU) for each in (step, packed))
    for place in step.inputs:
        _assert_same(here.of(place), there.of(place))
    for routes in step.routes.from_source.values():
        for route in routes:
            _assert_same(here.output_rows(route), there.output_rows(route))


def _assert_same(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True) if isinstance(first, tuple) else ((first, second),):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
            continue
        for name in ("positions", "patches", "token_ids", "targets", "item_rows"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
        assert one.packed is not None and one.packed.lengths == other.packed.lengths
