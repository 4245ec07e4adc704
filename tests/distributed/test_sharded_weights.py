"""Weights and gradients that replicas share layer by layer: the same results, the same checkpoints, less memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.gradient_cases import gradient_cases
from tests.distributed.training_case import (
    RankReport,
    TrainingCase,
    build_graph,
    build_plan,
    join_parameters,
    resume,
    run,
    train_and_save,
)

GRAPH, TIED = build_graph(), build_graph(tied=True)
FROZEN = build_graph(tied=True, frozen=("vision",))
UNEQUAL = {"vision": (1, 1, 2), "llm": (2, 1, 3)}
DEEP = {"vision": (2, 1, 2), "llm": (1, 2, 2)}
SPREAD = {"vision": (1, 1, 2, 1), "llm": (1, 2, 1, 3)}
"""With context parallelism."""
COLOCATED = {"vision": (1, 1, 4), "llm": (1, 2, 2), "colocated": True}
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@settings(max_examples=24, suppress_health_check=list(HealthCheck))
@given(case=gradient_cases(has_unlike_replicas=False))
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    """Replicas of any numbers of microbatches, in any order, join each other's computations."""
    assert_matches(replace(case, shards_weights=True), ranks)


@pytest.mark.deep(when=lambda sizes: sizes in (SPREAD, DEEP))
@pytest.mark.parametrize(
    ("graph", "sizes", "dtype"),
    [
        (TIED, UNEQUAL, torch.float64),
        (TIED, SPREAD, torch.float32),
        (FROZEN, COLOCATED, torch.bfloat16),
        (GRAPH, DEEP, torch.bfloat16),
    ],
    ids=["tied unequal", "tied spread", "frozen colocated", "deep"],
)
def test_training_and_checkpoints_equal_those_of_sharded_optimizers(
    ranks: RankPool, tmp_path: Path, graph: Any, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Both resume from each other's checkpoints."""
    whole = TrainingCase(graph, build_plan(graph, **sizes), dtype=dtype, sequence_parallel=sizes in (UNEQUAL, DEEP))
    shared = replace(whole, shards_weights=True)
    of_whole: list[RankReport] = run(ranks, train_and_save, whole, tmp_path / "whole", 2, 2)
    of_shared: list[RankReport] = run(ranks, train_and_save, shared, tmp_path / "shared", 2, 2)
    assert_alike(whole, of_shared, of_whole)
    for case, saved, name in ((shared, of_whole, "whole"), (whole, of_shared, "shared"), (shared, of_shared, "shared")):
        resumed: list[RankReport] = run(ranks, resume, case, tmp_path / name, 2)
        assert_same(at_checkpoint(case, resumed), at_checkpoint(case, saved))
        assert_alike(whole, resumed, saved)
        if case is shared and saved is of_shared:
            assert [report.losses for report in resumed] == [report.losses for report in saved]


def test_another_plan_resumes_from_shared_weights(ranks: RankPool, tmp_path: Path) -> None:
    first = TrainingCase(TIED, build_plan(TIED, **UNEQUAL), dtype=torch.float64, shards_weights=True)
    second = TrainingCase(TIED, build_plan(TIED, **COLOCATED), dtype=torch.float64, shards_weights=True)
    before: list[RankReport] = run(ranks, train_and_save, first, tmp_path, 2, 2)
    after: list[RankReport] = run(ranks, resume, second, tmp_path, 2)
    assert_same(at_checkpoint(second, after), at_checkpoint(first, before))
    assert np.allclose(after[0].losses, before[0].losses, rtol=1e-9, atol=0)


def at_checkpoint(case: TrainingCase, reports: list[RankReport]) -> dict[tuple[str, str], np.ndarray]:
    return join_parameters(case.plan, [report.parameters_at_checkpoint for report in reports])


def assert_same(found: dict[tuple[str, str], np.ndarray], expected: dict[tuple[str, str], np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], values) for key, values in expected.items())


def assert_alike(case: TrainingCase, found: list[RankReport], expected: list[RankReport]) -> None:
    """Losses of all steps to the precision; in float64 every weight, too."""
    assert np.allclose(found[0].losses, expected[0].losses, rtol=TOLERANCES[case.dtype], atol=0)
    if case.dtype == torch.float64:
        ends = [join_parameters(case.plan, [report.parameters_at_end for report in reports]) for reports in (found, expected)]
        assert all(np.allclose(ends[0][key], values, rtol=1e-6, atol=1e-9) for key, values in ends[1].items())
