"""Adapters of linear layers: gradients of one process under every kind of parallelism; the base stays as it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multimodal.model.adapter import is_adapter
from multimodal.values.model_graph import Lora, ModelGraph
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankError, RankPool
from tests.distributed.test_overlapped_linear import CHANGES, build_case
from tests.distributed.training_case import TrainingCase, build_graph, build_plan, join_parameters, resume, run, train_and_save

MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
OF_LLM = Lora(2, 6.0, (*(f"transformer.{name}" for name in MODULES), "head.output_layer"))
OF_VISION = Lora(3, None, ("transformer.linear_qkv", "transformer.linear_fc2", "projector.linear_fc1", "projector.linear_fc2"))
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("tp 2 and 4", "plain"): {},
    ("tp 4, pp 2", "zb-h1"): {"num_overlapped_parts": 1},
    ("tp 2, cp 2", "split backward"): {"shards_weights": True},
}


def with_adapters(case: GradientCase, **loras: Lora) -> GradientCase:
    units = tuple(replace(unit, lora=loras.get(unit.name)) for unit in case.graph.units)
    return replace(case, graph=replace(case.graph, units=units))


@pytest.mark.deep(when=lambda change: change != "zb-h1")  # planted errors are of the first kind
@pytest.mark.parametrize(("sizes", "change"), CASES)
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, sizes: str, change: str) -> None:
    case = build_case(sizes, **{**CHANGES[change], **CASES[sizes, change]})
    assert_matches(with_adapters(case, llm=OF_LLM, vision=OF_VISION), ranks)


ROWS: dict[tuple[str, str], dict[str, Any]] = {
    ("tp 4, pp 2", "zb-h1"): {"tied": True},
    ("tp 2, cp 2", "split backward"): {"tied": True, "lora": None},
    ("tp 2, two replicas", "weights shared"): {},
}


@pytest.mark.deep(when=lambda change: change != "zb-h1")
@pytest.mark.parametrize(("sizes", "change"), ROWS)
def test_new_rows_of_a_frozen_vocabulary(ranks: RankPool, sizes: str, change: str) -> None:
    """Rows 4 to 7 of 12 are on both of two ranks, beside adapters and in an LLM that is frozen otherwise."""
    given = {"tied": False, "lora": OF_LLM, **ROWS[sizes, change]}
    case = build_case(sizes, **CHANGES[change])
    unit = replace(case.graph.unit("llm"), untie_embeddings_and_output_weights=not given["tied"], new_tokens=(4, 8))
    lora = replace(OF_LLM, targets=OF_LLM.targets[:-1]) if given["lora"] else None
    unit = replace(unit, lora=lora, freeze_module=lora is None)
    units = tuple(unit if each.name == "llm" else each for each in case.graph.units)
    assert_matches(replace(case, graph=replace(case.graph, units=units)), ranks)


CHANGED: dict[str, dict[str, Any]] = {"llm": {"lora": OF_LLM, "new_tokens": (7, 12)}, "vision": {"lora": OF_VISION}}
TRAINED = ModelGraph(tuple(replace(unit, **CHANGED[unit.name]) for unit in build_graph().units), (("vision", "llm"),))
SPLIT = TrainingCase(TRAINED, build_plan(TRAINED, vision=(1, 1, 1), llm=(2, 1, 1)))
SHARED = TrainingCase(TRAINED, build_plan(TRAINED, vision=(1, 1, 2), llm=(1, 1, 2), colocated=True), shards_weights=True)


def test_adapters_alone_are_trained_and_go_on_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    before = run(ranks, train_and_save, SPLIT, tmp_path, 1, 1)
    after = run(ranks, resume, SHARED, tmp_path, 1)
    np.testing.assert_allclose([report.losses for report in after], [before[0].losses] * len(after), rtol=1e-5)
    at_start, at_end = (
        join_parameters(SPLIT.plan, parameters)
        for parameters in ([each.parameters_at_checkpoint for each in before], [each.parameters_at_end for each in before])
    )
    changed = {key for key in at_start if not np.array_equal(at_start[key], at_end[key])}
    assert changed == {(unit, name) for unit, name in at_start if is_adapter(name)}


def test_adapters_are_added_to_what_was_trained_without_and_never_dropped(ranks: RankPool, tmp_path: Path) -> None:
    plain = replace(SPLIT, graph=build_graph())
    base = run(ranks, train_and_save, plain, tmp_path / "base", 1, 0)
    added = run(ranks, resume, SPLIT, tmp_path / "base", 1)
    assert all(report.loaded is not None and report.loaded.units_with_fresh_optimizer == ("llm", "vision") for report in added)
    before, after = (
        join_parameters(case.plan, [report.parameters_at_checkpoint for report in reports])
        for case, reports in ((plain, base), (SPLIT, added))
    )
    assert all(np.array_equal(after[key], before[key]) for key in before)
    run(ranks, train_and_save, SPLIT, tmp_path / "adapted", 1, 0)
    with pytest.raises(RankError, match=r"another model: model.units.vision.lora is only in the checkpoint"):
        run(ranks, resume, plain, tmp_path / "adapted", 1)
