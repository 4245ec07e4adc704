"""Layers of Transformer Engine, its real Python over a stand-in for its compiled module: loss and gradients of local layers."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import check_calls
from multimodal.cost.layers.registry import read_model
from multimodal.cost.pieces.tensor_parallel_waits import computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.plan import Plan, UnitPlan
from multimodal.values.schedule import SlotMode
from tests.distributed.dealt_case import UNITS, dealt_case, source_of, unit_plan
from tests.distributed.drop_in_training import LoopCase, LoopResult, train_on_schedule
from tests.distributed.gradient_case import GradientCase, reference_of, run_on_rank, run_reference, single_rank_plan
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder
from tests.distributed.hugging_face_comparison import Comparison, Plans, case_of
from tests.distributed.narrow_examples import EXAMPLES, ROWS, case_of_example, narrow, second_step
from tests.distributed.segment_ranges import RangeCase, count_waits
from tests.distributed.test_every_builder import MODELS, build_case
from tests.distributed.test_inside_waits import PAIRS, QUARTET, WAITS, layers_of, schedule_of
from tests.distributed.test_inside_waits import build_case as build_inside
from tests.distributed.wide_transformers import build_wide_model
from tests.engine_on_cpu.compiled import CommOverlap
from tests.engine_on_cpu.engine_pool import EnginePool
from tests.engine_on_cpu.fp8_steps import train_in_fp8
from tests.engine_on_cpu.install import FOLDER

NAMES = ("vision", "llm")
BIASES = {"add_bias_linear": True, "add_qkv_bias": True, "normalization": "LayerNorm", "activation": "gelu"}
HEAD_NORMS = {"qk_layernorm": True}
ADAPTED = [f"transformer.linear_{name}" for name in ("qkv", "proj", "fc1", "fc2")]
ADAPTERS = {"llm": {"lora": {"rank": 2, "targets": ADAPTED}}}
EXPERTS = {"llm": {"experts": {"num_experts": 4, "aux_loss_coeff": 0.1, "ffn_hidden_size": 12}}}
VERSIONS = {folder.name: folder for folder in sorted(Path(os.environ.get(FOLDER, "none")).glob("*/"))}
WHOLE, WITHOUT_FP8 = "2.8.0", "2.20.2"
"""The version that every row runs with; and the one whose compiled module allocates tensors in FP8, as the stand-in does not."""
LIKE_OTHERS = (
    *("head norms, sequence parallel", "recompute, split, biases", "recompute attention", "frozen encoder"),
    *("two stages, frozen LLM", "four ranks"),
    *(
        "experts, weights shared",
        "adapters, split, tp 2, biases",
        "adapters, sequence parallel, recompute",
        "weights shared",
        "weights shared, recompute",
        "encoders of one rank",
        "modulated, recompute",
        "biases, split, sequence parallel",
    ),
)
"""Rows of which others have every part."""


@pytest.fixture(scope="module")
def engine_ranks() -> Iterator[EnginePool]:
    if WHOLE not in VERSIONS:
        pytest.skip(f"{FOLDER} names no folder with versions of Transformer Engine; scripts/test.sh downloads them")
    with closing(EnginePool(VERSIONS[WHOLE], 8)) as pool:
        yield pool


def _case(
    builder: str,
    *,
    tensor: int = 1,
    experts: int = 1,
    shape: Mapping[str, Any] | None = None,
    units: Mapping[str, Any] | None = None,
    **options: Any,
) -> GradientCase:
    """An encoder on one stage beside an LLM of two stages and one or, without tensor parallelism, two replicas.

    experts: expert parallel size.
    """
    changed = {name: {**UNITS[name], **(shape or {}), **(units or {}).get(name, {})} for name in NAMES}
    replicas = 1 if tensor > 1 else 2
    sizes = {
        "vision": UnitSizes(tensor, data_parallel_size=1),
        "llm": UnitSizes(tensor, 2, data_parallel_size=replicas, expert_parallel_size=experts),
    }
    plan = plan_disaggregated(source_of(changed).graph, sizes=sizes, world_size=tensor * (1 + 2 * replicas))
    return dealt_case(changed, plan, builder=builder, transformer_impl="transformer_engine", **options)


ALONE = unit_plan(0, dp=4)
BUFFERS = {"tensor": 2, "sequence_parallel": True, "groups": ([0, 1, 2], [3], [4]), "buffer_rows": 24}
"""Of 22, 3 and 4 tokens, the first are padded to them."""


CASES = {
    "biases, head norms, split, tp 2": _case("zb-h1", shape={**BIASES, **HEAD_NORMS}, tensor=2),
    "biases, split, sequence parallel": _case("zb-h1", shape=BIASES, tensor=2, sequence_parallel=True),
    "head norms, sequence parallel": _case("1f1b", shape=HEAD_NORMS, tensor=2, sequence_parallel=True),
    "recompute, split, biases": _case("zb-h1", shape=BIASES, recompute="full"),
    "recompute attention": _case("1f1b", recompute="selective"),
    "frozen encoder": _case("1f1b", units={"vision": {"freeze_module": True}}),
    "adapters, split, tp 2, biases": _case("zb-h1", units=ADAPTERS, tensor=2, shape=BIASES),
    "adapters, sequence parallel, recompute": _case("1f1b", units=ADAPTERS, tensor=2, sequence_parallel=True, recompute="full"),
    "adapters, split, sequence parallel": _case("zb-h1", units=ADAPTERS, tensor=2, sequence_parallel=True),
    "experts, split, tp 2": _case("zb-h1", units=EXPERTS, tensor=2, sequence_parallel=True),
    "experts shared by replicas, split": _case("zb-h1", units=EXPERTS, experts=2),
    "experts, weights shared": _case("1f1b", units=EXPERTS, shards_weights=True),
    "weights shared": _case("1f1b", shape=BIASES, shards_weights=True),
    "weights shared, split": _case("zb-h1", shape=BIASES, shards_weights=True),
    "weights shared, recompute": _case("1f1b", shards_weights=True, recompute="full"),
    "user buffers, biases, recompute": _case("1f1b", shape=BIASES, recompute="full", **BUFFERS),
    "user buffers, frozen LLM": _case("gpipe", units={"llm": {"freeze_module": True}}, **BUFFERS),
    "frozen LLM, split": _case("zb-h1", shape=BIASES, units={"llm": {"freeze_module": True}}),
}
FLOW = {"llm": UNITS["llm"], "painter": {**UNITS["painter"], **BIASES, "flow": {"condition_tokens": 2, "condition_dropout": 0.3}}}
for name, painter, options in (
    ("modulated, split, tp 2", {"tp": 2}, {"builder": "zb-h1", "sequence_parallel": True}),
    ("modulated, recompute", {"pp": 2}, {"recompute": "full"}),
):
    plan = Plan({"llm": unit_plan(0), "painter": unit_plan(1, **painter)})
    CASES[name] = dealt_case(FLOW, plan, transformer_impl="transformer_engine", **options)


@pytest.mark.deep(when=lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_local_layers(engine_ranks: EnginePool, name: str) -> None:
    assert_matches(CASES[name], engine_ranks)


def count_overlapped(case: GradientCase) -> int:
    before = CommOverlap.num_products
    run_on_rank(case)
    return CommOverlap.num_products - before


def test_a_loop_of_megatrons_leaves_weight_gradients_of_the_engine_to_bubbles(engine_ranks: EnginePool) -> None:
    case = LoopCase(2, has_engine=True)
    expected: list[LoopResult] = engine_ranks.run(train_on_schedule, case, None, world_size=4)
    found: list[LoopResult] = engine_ranks.run(
        train_on_schedule, replace(case, delays_weight_gradients=True), "zb-h1", world_size=4
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array(mine.losses) == pytest.approx(np.array(theirs.losses), rel=0, abs=1e-9)
        for name, gradient in theirs.gradients.items():
            np.testing.assert_allclose(mine.gradients[name], gradient, rtol=0, atol=1e-9, err_msg=name)


def test_products_of_the_microbatch_that_fills_user_buffers_have_collectives_beside_them(engine_ranks: EnginePool) -> None:
    """Four forwards and four backwards of the layer that each stage of the LLM has."""
    assert engine_ranks.run(count_overlapped, CASES["user buffers, frozen LLM"], world_size=6) == [0, 0, 8, 8, 8, 8]


@pytest.mark.deep(when=lambda name: name not in ("1f1b", "zb-v"))  # one that splits and one that does not
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_builder(engine_ranks: EnginePool, name: str) -> None:
    case = build_case(name, MODELS["encoder, LLM and generator"])
    assert_matches(replace(case, transformer_impl="transformer_engine"), engine_ranks)


INSIDE: Mapping[str, tuple[int, UnitPlan, dict[str, Any]]] = {
    "two stages, sequence parallel": (2, PAIRS, {"sequence_parallel": True}),
    "two stages, frozen LLM": (2, PAIRS, {"sequence_parallel": True, "described": {"freeze_module": True, **BIASES}}),
    "encoders of one rank": (2, ALONE, {"sequence_parallel": True}),
    "four ranks": (4, QUARTET, {"sequence_parallel": True, "described": HEAD_NORMS}),
}


@pytest.mark.deep(when=lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", INSIDE)
def test_pieces_of_encoders_in_waits(engine_ranks: EnginePool, name: str) -> None:
    tensor, encoders, options = INSIDE[name]
    case = build_inside(tensor, encoders, **options, transformer_impl="transformer_engine")
    assert (schedule_of(case).modes == SlotMode.INSIDE).sum() >= 10
    assert_matches(case, engine_ranks)


def check_all_calls() -> tuple[int, str]:
    with redirect_stdout(StringIO()) as said:
        return check_calls.main(["--require", "transformer_engine"]), said.getvalue()


def count_waits_of(cases: list[RangeCase]) -> list[tuple[int, int]]:
    return [count_waits(replace(case, transformer_impl="transformer_engine")) for case in cases]


def assert_calls_and_waits(pool: EnginePool, cases: list[RangeCase]) -> None:
    """All calls fit the version, and layers come to as many waits as costs count."""
    ((code, said),) = pool.run(check_all_calls, world_size=1)
    assert code == 0 and "transformer_engine: not" not in said, said
    for case, found in zip(cases, pool.run(count_waits_of, cases, world_size=2)[0], strict=True):
        options = RunOptions(sequence_parallel=case.sequence_parallel, recompute=case.recompute)
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        assert found == tuple(len(computation_waits(kind, layers_of(case), options=options)) for kind in kinds), case


def test_calls_fit_and_layers_come_to_as_many_waits_as_costs_count(engine_ranks: EnginePool) -> None:
    assert_calls_and_waits(engine_ranks, WAITS)


@pytest.mark.deep  # another world of processes for each; what Braid calls is the same in all of them
@pytest.mark.parametrize("version", sorted(VERSIONS.keys() - {WHOLE}))
def test_another_version(version: str) -> None:
    with closing(EnginePool(VERSIONS[version], 8)) as pool:
        assert_calls_and_waits(pool, WAITS)
        for case in CASES.values():
            assert_matches(case, pool)
        for recipe in RECIPES if version != WITHOUT_FP8 else ():
            assert_weights_of_the_last_update(pool, recipe)


PLANS: Plans = {
    "alone": ({"llm": (1, 1, 1)}, {}),
    "tp 2, pp 2": ({"llm": (2, 2, 1)}, {"sequence_parallel": True, "builder": "zb-h1"}),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, {"shards_weights": True, "recompute": "full"}),
}


FAMILIES = ("qwen3", "mixtral", "gemma3", "siglip and qwen2", "internvl", "qwen2.5-vl", "qwen3-vl", "qwen2.5-omni")


@pytest.mark.deep  # test_engine_training.py has a run from a folder and back; test_hugging_face_families.py the weights' places
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_hugging_face(engine_ranks: EnginePool, tmp_path: Path, name: str) -> None:
    """The gradients that local layers have from it, and files that are the same byte for byte."""
    families = pytest.importorskip("tests.distributed.test_hugging_face_families", reason="transformers is not installed")
    make, shapes, plans, _, marks = families.FAMILIES[name]
    folder = tmp_path / "model"
    build_wide_model(make, folder, max_shard_size="10KB")
    graph = read_model(folder)
    alone = {unit.name: (1, 1, 1) for unit in graph.units} | {"colocated": len(graph.units) > 1}
    (expected,) = engine_ranks.run(FromFolder(folder), case_of(graph, shapes, alone, marks=marks), world_size=1)
    plans = PLANS if name in FAMILIES[:2] else plans
    plans = {each: (sizes, {**options, "transformer_impl": "transformer_engine"}) for each, (sizes, options) in plans.items()}
    Comparison(folder, graph, shapes, marks, expected).assert_under_plans(plans, engine_ranks)


RESUMED = "FP8", ROWS["FP8"][0]
"""Three units, and what layers alone keep; test_round_trips.py has experts."""


def test_rows_have_every_shape_of_the_examples_once() -> None:
    shapes = {path.stem: narrow(read_model(path)) for path in EXAMPLES.glob("*.yaml")}
    in_rows = [shapes[name] for names in ROWS.values() for name in names]
    assert {*in_rows} == {*shapes.values()} and len({*in_rows}) == len(in_rows)


@pytest.mark.deep(when=lambda option, name: name != ROWS[option][0])
@pytest.mark.parametrize("option, name", [(option, name) for option, names in ROWS.items() for name in names])
def test_a_step_of_every_example(engine_ranks: EnginePool, option: str, name: str) -> None:
    """Loss and gradients of local layers; those of FP8 are off by more than bfloat16's rounding, and by no more than its own."""
    case = case_of_example(name, option)
    if option != "FP8":
        assert_matches(case, engine_ranks)
        return
    exact = replace(reference_of(case), dtype=torch.float64, fp8_recipe=None)
    (found,), (expected,) = (
        engine_ranks.run(run_on_rank, case, world_size=1),
        engine_ranks.run(run_reference, exact, world_size=1),
    )
    assert found.loss_sums == pytest.approx(expected.loss_sums, rel=0.05)
    gradients, right = (np.concatenate([each.gradients[key].ravel() for key in expected.gradients]) for each in (found, expected))
    assert 0.05 < np.linalg.norm(gradients - right) / np.linalg.norm(right) < 0.4


@pytest.mark.deep(when=lambda option, name: (option, name) != RESUMED)
@pytest.mark.parametrize("option, name", [(option, name) for option, names in ROWS.items() for name in names])
def test_every_example_resumes(engine_ranks: EnginePool, tmp_path: Path, option: str, name: str) -> None:
    """The step behind a checkpoint is the same, bit for bit; in bfloat16, as Transformer Engine's optimizer has no float64."""
    case = replace(case_of_example(name, option), dtype=torch.bfloat16)
    whole, resumed = (
        engine_ranks.run(second_step, case, tmp_path, each, world_size=case.plan.num_ranks) for each in (False, True)
    )
    for (loss, weights), (again, found) in zip(whole, resumed, strict=True):
        assert loss == again and weights.keys() == found.keys() and weights
        assert all(np.array_equal(found[key], value) for key, value in weights.items())


def fp8_case(recipe: str, **described: Any) -> GradientCase:
    """An LLM of sizes that FP8 can have, on one rank."""
    shape = {"hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 4}
    units = {"llm": {**UNITS["llm"], **shape, **described}}
    plan = single_rank_plan(source_of(units).graph)
    return dealt_case(units, plan, transformer_impl="transformer_engine", dtype=torch.bfloat16, fp8_recipe=recipe)


RECIPES = ("tensorwise", "delayed", "blockwise")


def assert_weights_of_the_last_update(pool: EnginePool, recipe: str) -> None:
    (steps,) = pool.run(train_in_fp8, fp8_case(recipe), 3, world_size=1)
    for earlier, step in pairwise(steps):
        for name, (weight, used) in step.items():
            assert np.abs(used - weight).mean() < 0.2 * np.abs(used - earlier[name][0]).mean(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_in_fp8_have_the_weights_of_the_last_update(engine_ranks: EnginePool, recipe: str) -> None:
    assert_weights_of_the_last_update(engine_ranks, recipe)


def test_adapters_beside_products_in_fp8(engine_ranks: EnginePool) -> None:
    """Products have the frozen weights in FP8, in every step, and adapters learn beside them."""
    (steps,) = engine_ranks.run(train_in_fp8, fp8_case("tensorwise", **ADAPTERS["llm"]), 2, world_size=1)
    for name, (weight, used) in steps[1].items():
        assert np.abs(used - weight).mean() < 0.05 * np.abs(weight).mean(), name
        assert (weight == steps[0][name][0]).all(), name
    assert len(steps[1]) == 4 * UNITS["llm"]["num_layers"]


@pytest.mark.parametrize("described", [{}, {"experts": {"num_experts": 4, "router_topk": 4, "ffn_hidden_size": 76}}])
def test_products_of_narrow_widths_are_in_bfloat16(engine_ranks: EnginePool, described: dict[str, Any]) -> None:
    """All of a layer's: then its gradients are those of a run in bfloat16. Or those of its MLP: the others are in FP8."""
    narrow = {"hidden_size": 136, "ffn_hidden_size": 76, "num_layers": 1, **described}
    cases = [fp8_case("tensorwise", **narrow), replace(fp8_case("tensorwise", **narrow), fp8_recipe=None)]
    (found,), (expected,) = (engine_ranks.run(run_on_rank, each, world_size=1) for each in cases)
    for key, gradient in expected.gradients.items():
        assert np.abs(found.gradients[key] - gradient).max() <= 0.01 * np.abs(gradient).max(), key
    (steps,) = engine_ranks.run(train_in_fp8, fp8_case("tensorwise", **{**narrow, "hidden_size": 128}), 1, world_size=1)
    assert {name.rpartition(".")[2] for name in steps[0]} == {"linear_qkv", "linear_proj"}


@pytest.mark.deep(when=lambda recipe: recipe == "delayed")  # its weights are held against their updates above
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_experts_in_fp8(engine_ranks: EnginePool, recipe: str) -> None:
    """Their gradients are those of bfloat16 but for the rounding, where other rows would be off by more than their size."""
    case = fp8_case(recipe, num_layers=1, experts={"num_experts": 4, "router_topk": 4})  # all: a choice may turn on a rounding
    (found,), (expected,) = (engine_ranks.run(run_on_rank, each, world_size=1) for each in (case, replace(case, fp8_recipe=None)))
    of_experts = [key for key in expected.gradients if ".mlp.experts." in key[1]]
    assert len(of_experts) == 4 * 2
    for key in of_experts:
        scale = np.linalg.norm(expected.gradients[key])
        assert 0.01 * scale < np.linalg.norm(found.gradients[key] - expected.gradients[key]) < 0.7 * scale, key
