"""Checkpoints: what is in them, whatever runs beside a save, and what is taken of them; training that goes on from one.

It does bit for bit under the same plan, and from the same values under any other.
"""

import json
import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.runtime.checkpoint import storage
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import checkpoint_size, default_zero_stage
from multimodal.schedule.passes.reduce_by_layer import gather_parameters, reduce_by_layer
from multimodal.values.model_graph import ModelGraph
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_plan_change import ALIKE, CUT
from tests.distributed.training_case import (
    EXPERTS,
    RankReport,
    Training,
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
OVERLAPPING = {"vision": (1, 1, 3), "llm": (1, 3, 1), "colocated": True}
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
def test_the_same_plan_resumes_bit_for_bit(ranks, saved, name):
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
def test_another_plan_resumes_from_the_same_values(ranks, saved, name):
    assert_resumed(ranks, saved, *OTHERS[name])


@pytest.mark.deep(when=lambda name: name != "weights shared")
@pytest.mark.parametrize("name", CHANGES)
def test_training_otherwise_is_the_same_and_resumes_from_each_others_checkpoints(ranks, saved, name):
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


@pytest.mark.deep(when=lambda shards_weights: not shards_weights)
@pytest.mark.parametrize("shards_weights", [False, True])
def test_steps_that_run_beside_a_save_are_not_in_it(ranks, tmp_path, shards_weights):
    """The file is held back until a step later has changed every value."""
    case = case_of(TIED, COLOCATED, BFLOAT16, shards_weights=shards_weights, saves_in_background=True)
    expected: list[RankReport] = run(ranks, train_while_saving, case, tmp_path, 1, 1)
    found: list[RankReport] = run(ranks, resume, case, tmp_path, 1)
    assert_resumed_bit_for_bit(found, expected=expected)


def train_while_saving(case: TrainingCase, folder: Path, num_before: int, num_after: int) -> RankReport:
    may_write, is_complete = threading.Event(), "step_00000001"
    write = storage.write_tensors

    def write_late(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    def let_write() -> None:
        assert not (folder / is_complete).exists()
        may_write.set()

    with mock.patch.object(storage, "write_tensors", write_late):
        report = train_and_save(case, folder, num_before, num_after, let_write)
    assert (folder / is_complete).exists()
    return report


def test_whole_tensors_can_be_put_together_without_braid(ranks, tmp_path):
    """As docs/checkpoints.md shows."""
    case = case_of(TIED, WIDE)
    saved: list[RankReport] = run(ranks, train_and_save, case, tmp_path, 1, 0)
    checkpoint = tmp_path / "step_00000001"
    index = json.loads((checkpoint / "tensors.json").read_text())
    found = {}
    for key, tensor in index.items():
        whole = np.full(tensor["shape"], np.nan, tensor["dtype"])
        for file, start, offsets, sizes, _ in tensor["pieces"]:
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            values = np.fromfile(checkpoint / file, tensor["dtype"], count=math.prod(sizes), offset=start)
            whole[place] = values.reshape(sizes)
        kind, unit, name = key.split(".", 2)
        if kind == "model":
            found[unit, name] = whole
    assert_equal(found, join_parameters(case.plan, [report.parameters_at_checkpoint for report in saved]))


def test_weights_alone_load_into_another_precision(ranks, tmp_path):
    first, second = case_of(GRAPH, COLOCATED), case_of(GRAPH, ONE_RANK, BFLOAT16)
    before: list[RankReport] = run(ranks, train_and_save, first, tmp_path, 1, 1)
    after: list[RankReport] = run(ranks, resume, second, tmp_path, 1, False)
    saved = join_parameters(first.plan, [report.parameters_at_checkpoint for report in before])
    rounded = {key: torch.from_numpy(values).bfloat16().float().numpy() for key, values in saved.items()}
    assert_equal(join_parameters(second.plan, [report.parameters_at_checkpoint for report in after]), rounded)
    assert np.allclose(after[0].losses, before[0].losses, rtol=2e-2, atol=0)


@pytest.mark.deep  # test_lora.py has units with a fresh optimizer
def test_a_unit_that_was_frozen_starts_with_a_fresh_optimizer(ranks, tmp_path):
    """From then on step counts differ between parameters, and that is saved, too."""
    frozen, trained = case_of(build_graph(frozen=("vision",)), WIDE), case_of(GRAPH, COLOCATED)
    run(ranks, train_and_save, frozen, tmp_path, 1, 0)
    first: list[RankReport] = run(ranks, resume, trained, tmp_path, 2)
    assert {report.loaded.units_with_fresh_optimizer for report in first if report.loaded} == {("vision",)}
    second: list[RankReport] = run(ranks, train_one_save_train_one, trained, tmp_path)
    third: list[RankReport] = run(ranks, resume, trained, tmp_path, 1)
    assert second[0].losses == first[0].losses[1:]
    assert third[0].losses == second[0].losses
    assert {report.loaded.units_with_fresh_optimizer for report in third if report.loaded} == {()}


def train_one_save_train_one(case: TrainingCase, folder: Path) -> RankReport:
    training = Training(case)
    step = training.load(folder).step
    training.train_step(step)
    training.save(folder, step=step + 1)
    return RankReport([training.train_step(step + 1)], {}, {})


def test_what_else_a_run_is_comes_back(ranks, tmp_path):
    saved = run(ranks, draw_after_saving, case_of(GRAPH, OVERLAPPING), tmp_path)
    loaded = run(ranks, draw_after_loading, case_of(GRAPH, COLOCATED), tmp_path)
    assert len(set(saved)) > 1
    assert all(report == (saved[0], 0, {"fingerprint": "a1"}, {"num_steps": 0}, "step_00000000") for report in loaded)


def draw_after_saving(case: TrainingCase, folder: Path) -> tuple[float, ...]:
    seed = 11 + torch.distributed.get_rank()
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    draw()
    Training(case).save(folder, step=0, run_state={"fingerprint": "a1"})
    return draw()


def draw_after_loading(case: TrainingCase, folder: Path) -> tuple[Any, ...]:
    loaded = Training(case).load(folder)
    return draw(), loaded.step, loaded.run_state, loaded.schedulers_state, loaded.path.name


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))


def assert_equal(found: dict[Any, Any], expected: dict[Any, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not np.array_equal(value, found[key])] == []
