"""Training that goes on from a checkpoint: bit for bit under the same plan, from the same values under any other."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import checkpoint_size, default_zero_stage
from multimodal.schedule.passes.reduce_by_layer import gather_parameters, reduce_by_layer
from multimodal.values.model_graph import ModelGraph
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_state_copies import ALIKE, CUT
from tests.distributed.training_case import (
    EXPERTS,
    RankReport,
    TrainingCase,
    assert_resumed_bit_for_bit,
    build_graph,
    build_plan,
    join_parameters,
    resume,
    run,
    train_and_save,
)

GRAPH, TIED = build_graph(), build_graph(tied=True)
EDGES = build_graph(with_generator=True, with_edges=True)
FROZEN, PROJECTOR = build_graph(tied=True, frozen=("vision",)), build_graph(frozen=("vision", "llm"))
ONE_RANK = {"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}
WIDE = {"vision": (2, 1, 1), "llm": (2, 1, 2)}
DEEP = {"vision": (1, 2, 1), "llm": (1, 3, 1)}
EDGES_WIDE = {"vision": (2, 1, 1), "second": (1, 1, 2), "joint": (2, 1, 1), "llm": (2, 1, 1), "painter": (1, 1, 2)}
EDGES_DEEP = {"vision": (1, 2, 1), "second": (1, 1, 1), "joint": (1, 2, 1), "llm": (1, 2, 1), "painter": (1, 1, 1)}
COLOCATED = {"vision": (2, 1, 2), "llm": (1, 2, 2), "colocated": True}
SPREAD = {"vision": (1, 1, 2, 1), "llm": (1, 2, 1, 2)}
SPREAD_WIDE = {"vision": (2, 1, 1, 2), "llm": (2, 1, 1, 2)}
"""With context parallelism."""
UNEQUAL = {"vision": (1, 1, 2), "llm": (1, 1, 3)}
STAGES = {"vision": (1, 1, 2), "llm": (1, 2, 2)}
PAIRS, FOURS = ({"vision": (1, 1, 2), "llm": (1, 1, 4), "experts": count} for count in (2, 4))
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}
FLOAT64, FLOAT32, BFLOAT16 = TOLERANCES


def case_of(graph: ModelGraph, sizes: Mapping[str, Any], dtype: torch.dtype = FLOAT32, **options: Any) -> TrainingCase:
    wide = any(size[0] > 1 for size in sizes.values() if isinstance(size, tuple)) and "colocated" not in sizes
    return TrainingCase(graph, build_plan(graph, **sizes), dtype, sequence_parallel=wide, **options)


def copies_of(plan: Any, dtype: torch.dtype, count: int) -> TrainingCase:
    return TrainingCase(TIED, plan, dtype, num_state_copies=count)


SAME: dict[str, TrainingCase] = {
    "context parallel": case_of(TIED, SPREAD, BFLOAT16),
    "experts": case_of(EXPERTS, PAIRS),
    "weights shared, frozen encoder": case_of(FROZEN, COLOCATED, BFLOAT16, shards_weights=True),
    "one copy of the state, replicas cut differently": copies_of(CUT, FLOAT32, 1),
    "gathered by the schedule, reduced by layer": case_of(TIED, STAGES, passes=(gather_parameters, reduce_by_layer)),
}


Saved = Callable[[TrainingCase], tuple[Path, list[RankReport]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Trains a case for a step, saves, and trains for another one, once for all tests; returns the folder and the reports."""
    done: list[tuple[TrainingCase, Path, list[RankReport]]] = []

    def train(case: TrainingCase) -> tuple[Path, list[RankReport]]:
        for before, folder, reports in done:
            if before == case:
                return folder, reports
        folder = tmp_path_factory.mktemp("saved")
        done.append((case, folder, run(ranks, train_and_save, case, folder, 1, 1)))
        return done[-1][1:]

    return train


@pytest.mark.deep(when=lambda name: name not in ("context parallel", "weights shared, frozen encoder"))  # like rows below
@pytest.mark.parametrize("name", SAME)
def test_the_same_plan_resumes_bit_for_bit(ranks: RankPool, saved: Saved, name: str) -> None:
    case = SAME[name]
    folder, expected = saved(case)
    found: list[RankReport] = run(ranks, resume, case, folder, 1)
    assert_resumed_bit_for_bit(found, expected=expected)
    if not case.shards_weights and case.num_state_copies is None and case.graph is TIED:
        assert_has_predicted_size(folder / "step_00000001", case)


def assert_has_predicted_size(checkpoint: Path, case: TrainingCase) -> None:
    width = case.dtype.itemsize
    layers = StageLayers(case.graph, case.plan, case.vocab_size)
    predicted = checkpoint_size(layers, bytes_per_element=width, zero_stage=default_zero_stage(width))
    sizes = [file.stat().st_size for file in checkpoint.glob("*.bin")]
    num_counts = sum(key.startswith("step.") for key in json.loads((checkpoint / "tensors.json").read_text()))
    assert sum(sizes) == predicted.num_bytes + 4 * num_counts
    assert len(list(checkpoint.iterdir())) == predicted.num_files
    assert max(sizes) < 2 * predicted.most_written_bytes


OTHERS: dict[str, tuple[TrainingCase, TrainingCase]] = {
    "tied: tensor parallel to pipelines": (case_of(TIED, WIDE, BFLOAT16), case_of(TIED, DEEP, BFLOAT16)),
    "own ranks to shared ranks": (case_of(GRAPH, WIDE, FLOAT64), case_of(GRAPH, COLOCATED, FLOAT64)),
    "pipelines to context and tensor parallel": (case_of(GRAPH, DEEP, FLOAT64), case_of(GRAPH, SPREAD_WIDE, FLOAT64)),
    "only the projector is trained": (case_of(PROJECTOR, DEEP, FLOAT64), case_of(PROJECTOR, WIDE, FLOAT64)),
    "queries, edges between encoders and to a generator": (
        case_of(EDGES, {**EDGES_WIDE, "colocated": True}, FLOAT64),
        case_of(EDGES, EDGES_DEEP, FLOAT64),
    ),
    "experts of two to four replicas": (case_of(EXPERTS, PAIRS), case_of(EXPERTS, FOURS)),
    "copies of the state to tensor parallel": (copies_of(ALIKE, BFLOAT16, 2), case_of(TIED, STAGES, BFLOAT16)),
}
CHANGES: dict[str, tuple[TrainingCase, dict[str, Any]]] = {
    "weights shared": (case_of(TIED, UNEQUAL, FLOAT64), {"shards_weights": True}),
    "weights shared in two copies": (
        case_of(TIED, {"vision": (1, 1, 2), "llm": (1, 1, 4)}, FLOAT64),
        {"shards_weights": True, "num_state_copies": 2},
    ),
    "gathered by the schedule": (case_of(TIED, STAGES), {"passes": (gather_parameters,)}),
}
"""What a case is trained with, instead, from the same start and from each other's checkpoints."""


def assert_resumed(ranks: RankPool, saved: Saved, before: TrainingCase, after: TrainingCase) -> None:
    """The values that were saved, and from there the same losses to the precision."""
    folder, reports_before = saved(before)
    resumed: list[RankReport] = run(ranks, resume, after, folder, 1)
    expected, found = (
        join_parameters(case.plan, [report.parameters_at_checkpoint for report in reports])
        for case, reports in ((before, reports_before), (after, resumed))
    )
    assert found.keys() == expected.keys() and all(np.array_equal(found[key], values) for key, values in expected.items())
    assert np.allclose(resumed[0].losses, reports_before[0].losses, rtol=TOLERANCES[before.dtype], atol=0)


LIKE_OTHERS = (
    *("only the projector is trained", "pipelines to context and tensor parallel", "own ranks to shared ranks"),
    "copies of the state to tensor parallel",
)


@pytest.mark.deep(when=lambda name: name in LIKE_OTHERS)  # other tests change plans, or lose copies, like these between steps
@pytest.mark.parametrize("name", OTHERS)
def test_another_plan_resumes_from_the_same_values(ranks: RankPool, saved: Saved, name: str) -> None:
    assert_resumed(ranks, saved, *OTHERS[name])


@pytest.mark.deep(when=lambda name: name != "weights shared")
@pytest.mark.parametrize("name", CHANGES)
def test_training_otherwise_is_the_same_and_resumes_from_each_others_checkpoints(
    ranks: RankPool, saved: Saved, name: str
) -> None:
    """In float64 every weight, too."""
    plain, changes = CHANGES[name]
    changed = replace(plain, **changes)
    (_, of_plain), (_, of_changed) = map(saved, (plain, changed))
    assert np.allclose(of_changed[0].losses, of_plain[0].losses, rtol=TOLERANCES[plain.dtype], atol=0)
    if plain.dtype == FLOAT64:
        expected, found = (
            join_parameters(plain.plan, [report.parameters_at_end for report in each]) for each in (of_plain, of_changed)
        )
        assert all(np.allclose(found[key], values, rtol=1e-6, atol=1e-9) for key, values in expected.items())
    if changes.get("passes") == (gather_parameters,):
        assert [report.losses for report in of_changed] == [report.losses for report in of_plain]
    assert_resumed(ranks, saved, plain, changed)
    assert_resumed(ranks, saved, changed, plain)
