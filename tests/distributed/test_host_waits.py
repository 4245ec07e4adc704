"""No step makes the host wait for the device between its first and its last action."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron.runtime.execution.running_step import RunningStep
from multimodal.schedule.passes import PASSES
from multimodal.values.action import Action
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.host_waits import counting_in_lanes
from tests.distributed.rank_pool import RankPool
from tests.distributed.spread_case import build_case, unit_plan, whole_items_case

SPREAD = build_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=2, tp=2), painter=unit_plan(2, tp=2))
PIPELINE = replace(
    build_case(vision=unit_plan(0), llm=unit_plan(1, pp=2), painter=unit_plan(3)),
    builder="zb-h1",
    passes=(PASSES["fill"], PASSES["gather-parameters"]),
)
CASES = {
    "spread over ranks": replace(SPREAD, sequence_parallel=True),
    "recomputed": replace(SPREAD, recompute="full"),
    "pipeline, split backwards": PIPELINE,
    "whole items": whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(2, cp=2), painter=unit_plan(0, cp=2)),
    "sharded weights": replace(SPREAD, shards_weights=True),
}


def waits_on_rank(case: GradientCase, planted: bool = False) -> list[str]:
    session, step = build_session(case), plan_case(case)
    original = RunningStep.forward

    def forward(self: RunningStep, action: Action) -> None:
        original(self, action)
        float(torch.ones(()))

    with counting_in_lanes() as found, patch.object(RunningStep, "forward", forward if planted else original):
        run_step(session, step)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_none(ranks: RankPool, name: str) -> None:
    assert ranks.run(waits_on_rank, CASES[name], world_size=CASES[name].plan.num_ranks) == [[]] * CASES[name].plan.num_ranks


def test_one_is_found(ranks: RankPool) -> None:
    found = ranks.run(waits_on_rank, PIPELINE, True, world_size=PIPELINE.plan.num_ranks)
    assert all(any("__float__" in line for line in lines) for lines in found)
