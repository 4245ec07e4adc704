"""A step on its way from a loader to the training process."""

import pickle
from typing import Any

import torch
from torch import Tensor

from megatron.runtime.execution.step_inputs import StepInputs
from megatron.runtime.feed.step_planner import StepOptions
from megatron.runtime.step.step import ROUTES, FoldedLengths, Step
from megatron.runtime.step.token_placement import ContextSharing
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.sample_lengths import SampleLengths
from tests.distributed.gradient_case import plan_all
from tests.distributed.spread_case import build_case, unit_plan

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
