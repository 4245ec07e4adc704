"""Checkpoints: what is in them, whatever runs beside a save, and what is taken of them."""

import json
import math
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.runtime.checkpoint import checkpoint as saving
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import (
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
ONE_RANK = {"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}
WIDE = {"vision": (2, 1, 1), "llm": (2, 1, 2)}
COLOCATED = {"vision": (2, 1, 2), "llm": (1, 2, 2), "colocated": True}
OVERLAPPING = {"vision": (1, 1, 3), "llm": (1, 3, 1), "colocated": True}


def case_of(graph: Any, sizes: dict[str, Any], **options: Any) -> TrainingCase:
    return TrainingCase(graph, build_plan(graph, **sizes), **options)


@pytest.mark.deep(when=lambda shards_weights: not shards_weights)
@pytest.mark.parametrize("shards_weights", [False, True])
def test_steps_that_run_beside_a_save_are_not_in_it(ranks: RankPool, tmp_path: Path, shards_weights: bool) -> None:
    """The file is held back until a step later has changed every value."""
    case = case_of(TIED, COLOCATED, dtype=torch.bfloat16, shards_weights=shards_weights, saves_in_background=True)
    expected: list[RankReport] = run(ranks, train_while_saving, case, tmp_path, 1, 1)
    found: list[RankReport] = run(ranks, resume, case, tmp_path, 1)
    assert_resumed_bit_for_bit(found, expected=expected)


def train_while_saving(case: TrainingCase, folder: Path, num_before: int, num_after: int) -> RankReport:
    may_write, is_complete = threading.Event(), "step_00000001"
    write = saving.write_tensors

    def write_late(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    with mock.patch.object(saving, "write_tensors", write_late):
        training = Training(case)
        for number in range(num_before):
            training.train_step(number)
        training.save(folder, step=num_before)
        at_checkpoint = training.parameters()
        losses = [training.train_step(number) for number in range(num_before, num_before + num_after)]
        assert not (folder / is_complete).exists()
        may_write.set()
        training.finish_saving()
    assert (folder / is_complete).exists()
    return RankReport(losses, at_checkpoint, training.parameters())


def test_whole_tensors_can_be_put_together_without_braid(ranks: RankPool, tmp_path: Path) -> None:
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


def test_weights_alone_load_into_another_precision(ranks: RankPool, tmp_path: Path) -> None:
    first, second = case_of(GRAPH, COLOCATED), case_of(GRAPH, ONE_RANK, dtype=torch.bfloat16)
    before: list[RankReport] = run(ranks, train_and_save, first, tmp_path, 1, 1)
    after: list[RankReport] = run(ranks, resume, second, tmp_path, 1, False)
    saved = join_parameters(first.plan, [report.parameters_at_checkpoint for report in before])
    rounded = {key: torch.from_numpy(values).bfloat16().float().numpy() for key, values in saved.items()}
    assert_equal(join_parameters(second.plan, [report.parameters_at_checkpoint for report in after]), rounded)
    assert np.allclose(after[0].losses, before[0].losses, rtol=2e-2, atol=0)


@pytest.mark.deep  # test_lora.py has units with a fresh optimizer
def test_a_unit_that_was_frozen_starts_with_a_fresh_optimizer(ranks: RankPool, tmp_path: Path) -> None:
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


def test_what_else_a_run_is_comes_back(ranks: RankPool, tmp_path: Path) -> None:
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
