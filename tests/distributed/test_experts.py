"""LLMs with experts, also where replicas share them: the same losses, gradients, steps and checkpoints as one process."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import Experts
from multimodal.values.plan import Plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.expert_cases import expert_cases
from tests.distributed.test_plan_change import ONE_RANK, Report, train
from tests.distributed.training_case import (
    SHAPES,
    TrainingCase,
    build_graph,
    build_plan,
    join_parameters,
    run,
    with_experts,
)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(case=expert_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


GRAPH = with_experts(build_graph(tied=True), Experts(4, ffn_hidden_size=12, aux_loss_coeff=0.1))


PAIRS = build_plan(GRAPH, vision=(1, 1, 2), llm=(1, 1, 4), experts=2)
DEEP = build_plan(GRAPH, vision=(2, 1, 1), llm=(1, 2, 2), experts=2)
FOURS = build_plan(GRAPH, vision=(1, 1, 2), llm=(1, 1, 4), experts=4)
WIDE = build_plan(GRAPH, vision=(1, 1, 2), llm=(2, 1, 2), experts=2)
ALONE = build_plan(GRAPH, vision=(1, 1, 2), llm=(1, 1, 4))
ONE = build_plan(GRAPH, **ONE_RANK)


@pytest.mark.deep(when=lambda dtype: dtype == torch.float64)  # float32 has ZeRO-1 beside it
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_training_goes_on_from_one_sharing_of_experts_to_another(ranks: RankPool, dtype: torch.dtype) -> None:
    """Losses, norms and weights, with the optimizer whole on every replica, and with one that replicas share (ZeRO-1)."""
    plans = [PAIRS, DEEP, FOURS, ALONE, WIDE]
    (expected,) = run(ranks, train, TrainingCase(GRAPH, ONE, dtype), [ONE], 2 * len(plans))
    found: list[Report] = run(ranks, train, TrainingCase(GRAPH, plans[0], dtype), plans, 2)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    assert np.allclose(found[0].losses, expected.losses, rtol=tolerance, atol=0)
    assert np.allclose(found[0].norms, expected.norms, rtol=10 * tolerance, atol=0)
    assert min(expected.balances) > 0.9
    assert np.allclose(found[0].balances, expected.balances, rtol=tolerance, atol=0)
    whole = join_parameters(plans[-1], [report.parameters for report in found])
    for key, values in join_parameters(ONE, [expected.parameters]).items():
        assert np.allclose(whole[key], values, rtol=tolerance, atol=1e-9 if dtype == torch.float64 else 1e-4), key


SOURCE = RandomSource(GRAPH, SHAPES, 36)
SAMPLES = tuple(Atom(index) for index in range(len(SHAPES)))
ITEMS = tuple(Atom(index, item) for index, shape in enumerate(SHAPES) for item in range(len(shape.items)))


def case_of(plan: Plan, *microbatches: tuple[Atom, ...], **options: Any) -> GradientCase:
    """The LLM's replicas have one microbatch each; the first of the encoder's has all items."""
    vision = ((ITEMS,), *(() for _ in plan.units["vision"].replicas[1:]))
    assignment = Assignment({"vision": vision, "llm": tuple((each,) for each in microbatches)})
    return GradientCase(GRAPH, plan, assignment, SOURCE, **options)


QUARTERS = SAMPLES[:2], SAMPLES[2:3], SAMPLES[3:4], SAMPLES[4:]
SPREAD = case_of(PAIRS, *QUARTERS)
SLICED = case_of(WIDE, SAMPLES[:3], SAMPLES[3:], sequence_parallel=True)
