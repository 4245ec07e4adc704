"""Checkpoints: exact under the same plan, independent of the plan, and no failure harms what is saved."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.rank_pool import RankPool
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
ONE_RANK = {"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}
WIDE = {"vision": (2, 1, 1), "llm": (2, 1, 3)}
DEEP = {"vision": (1, 2, 1), "llm": (1, 3, 2)}
COLOCATED = {"vision": (2, 1, 2), "llm": (1, 2, 2), "colocated": True}
OVERLAPPING = {"vision": (1, 1, 3), "llm": (1, 3, 1), "colocated": True}


def case_of(graph: Any, sizes: dict[str, Any], **options: Any) -> TrainingCase:
    return TrainingCase(graph, build_plan(graph, **sizes), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [DEEP, COLOCATED], ids=["deep", "colocated"])
def test_the_same_plan_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    case = case_of(TIED, sizes, dtype=dtype)
    expected: list[RankReport] = run(ranks, train_and_save, case, tmp_path, 3, 3)
    found: list[RankReport] = run(ranks, resume, case, tmp_path, 3)
    assert len({tuple(report.losses) for report in expected}) == 1
    for before, after in zip(expected, found, strict=True):
        assert after.losses == before.losses
        assert_equal(after.parameters_at_checkpoint, before.parameters_at_checkpoint)
        assert_equal(after.parameters_at_end, before.parameters_at_end)


OTHER_PLANS = [
    pytest.param(TIED, DEEP, WIDE, {}, {"sequence_parallel": True}, id="tied: pipelines to tensor parallel with sequence parallel"),
    pytest.param(TIED, WIDE, DEEP, {"sequence_parallel": True}, {}, id="tied: and back"),
    pytest.param(GRAPH, WIDE, COLOCATED, {}, {}, id="untied: own ranks to shared ranks"),
    pytest.param(GRAPH, OVERLAPPING, WIDE, {}, {}, id="untied: three replicas beside three stages"),
    pytest.param(GRAPH, ONE_RANK, DEEP, {}, {}, id="one rank to eight"),
    pytest.param(TIED, DEEP, ONE_RANK, {}, {}, id="eight ranks to one"),
    pytest.param(build_graph(frozen=("vision",)), WIDE, DEEP, {}, {}, id="frozen encoder"),
    pytest.param(build_graph(frozen=("vision", "llm")), DEEP, WIDE, {}, {}, id="only the projector is trained"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("graph", "saved", "resumed", "saved_options", "resumed_options"), OTHER_PLANS)
def test_another_plan_resumes_from_the_same_values(
    ranks: RankPool,
    tmp_path: Path,
    graph: Any,
    saved: dict[str, Any],
    resumed: dict[str, Any],
    saved_options: dict[str, Any],
    resumed_options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    first = case_of(graph, saved, dtype=dtype, **saved_options)
    second = case_of(graph, resumed, dtype=dtype, **resumed_options)
    before: list[RankReport] = run(ranks, train_and_save, first, tmp_path, 3, 3)
    after: list[RankReport] = run(ranks, resume, second, tmp_path, 3)
    saved_values = join_parameters(first.plan, [report.parameters_at_checkpoint for report in before])
    loaded_values = join_parameters(second.plan, [report.parameters_at_checkpoint for report in after])
    assert_equal(saved_values, loaded_values)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert np.allclose(after[0].losses, before[0].losses, rtol=tolerance, atol=0)


def assert_equal(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        values = (value[1], found[key][1]) if isinstance(value, tuple) else (value, found[key])
        assert np.array_equal(*values), f"{key} differs"
