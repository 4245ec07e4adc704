"""LLMs with experts, also where replicas share them: the same losses, gradients, steps and checkpoints as one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from megatron.runtime.communication import units
from megatron.runtime.communication.units import Membership
from multimodal.model.experts import dispatch, expert_mlp
from multimodal.model.experts.router import Routing, RowSequences, sequence_balance_loss
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import Experts, ModelGraph
from multimodal.values.plan import Plan
from tests.distributed.gradient_case import GradientCase, RankGradients, run_on_rank
from tests.distributed.gradient_comparison import MismatchError, assert_matches
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
    resume,
    run,
    train_and_save,
)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(case=expert_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


def with_experts(graph: ModelGraph, experts: Experts) -> ModelGraph:
    llm = graph.backbone
    shared = replace(llm, transformer=replace(llm.transformer, experts=experts))
    return replace(graph, units=tuple(shared if unit is llm else unit for unit in graph.units))


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


@pytest.mark.deep(when=lambda other: other in (FOURS, DEEP))
@pytest.mark.parametrize("other", [PAIRS, FOURS, DEEP, ONE], ids=["pairs", "fours", "deep", "one rank"])
def test_checkpoints_load_whoever_shares_experts(ranks: RankPool, tmp_path: Path, other: Plan) -> None:
    """Bit for bit under the same plan; what was saved, and the same training but for rounding, under another."""
    case = TrainingCase(GRAPH, PAIRS, torch.float32)
    before = run(ranks, train_and_save, case, tmp_path, 2, 2)
    after = run(ranks, resume, replace(case, plan=other), tmp_path, 2)
    saved, loaded = (
        join_parameters(plan, [report.parameters_at_checkpoint for report in reports])
        for plan, reports in ((PAIRS, before), (other, after))
    )
    assert saved.keys() == loaded.keys() and all(np.array_equal(saved[key], loaded[key]) for key in saved)
    assert np.allclose(before[0].losses, after[0].losses, rtol=0 if other is PAIRS else 2e-5, atol=0)


def as_if_alone(routing: Routing, sequences: RowSequences, *, experts: Experts) -> Tensor:
    """The loss that balances experts, from what a rank knows of a sequence without the others."""
    return sequence_balance_loss(routing, sequences._replace(groups=()), experts=experts)


def without_reduction(case: GradientCase) -> RankGradients:
    """Experts' gradients as this rank's group alone has them."""
    original = units._membership

    def alone(*args: Any, **options: Any) -> Membership:
        member = original(*args, **options)
        member.groups.expt_dp = member.groups.intra_expt_dp = member.groups.pp
        return member

    with patch.object(units, "_membership", alone):
        return run_on_rank(case)


def with_own_balance(case: GradientCase) -> RankGradients:
    with patch.object(expert_mlp, "sequence_balance_loss", as_if_alone):
        return run_on_rank(case)


def in_wrong_places(case: GradientCase) -> RankGradients:
    """Rows go back in the order in which they came."""
    with patch.object(dispatch._Order, "mirrored", property(lambda order: order)):
        return run_on_rank(case)


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


def test_what_errors_are_planted_in_is_right(ranks: RankPool) -> None:
    assert_matches(SPREAD, ranks)
    assert_matches(SLICED, ranks)


@pytest.mark.parametrize(
    ("planted", "case"), [(without_reduction, SPREAD), (with_own_balance, SLICED), (in_wrong_places, SPREAD)]
)
def test_planted_errors_are_found(ranks: RankPool, planted: Any, case: GradientCase) -> None:
    with pytest.raises(MismatchError):
        assert_matches(case, ranks, run=planted)
