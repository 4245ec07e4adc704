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
from megatron.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.training.trainer import build_scheduler
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.cost.pieces.tensor_parallel_waits import computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind
from multimodal.values.model_graph import ImageInput, ModelGraph, Transformer, Unit
from multimodal.values.plan import Plan
from multimodal.values.schedule import SlotMode
from tests.distributed import gradient_case
from tests.distributed.dealt_case import UNITS, dealt, dealt_case, source_of, unit_plan
from tests.distributed.drop_in_training import LoopCase, LoopResult, train_on_schedule
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import RATE, Comparison, FromFolder, Plans, case_of
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankError
from tests.distributed.segment_ranges import RangeCase, count_waits
from tests.distributed.test_every_builder import MODELS, build_case
from tests.distributed.test_inside_waits import PAIRS, WAITS, layers_of, schedule_of
from tests.distributed.test_inside_waits import build_case as build_inside
from tests.distributed.wide_transformers import build_wide_model
from tests.engine_on_cpu.compiled import CommOverlap, numbers_of
from tests.engine_on_cpu.install import FOLDER, EnginePool

EXAMPLES = Path("examples/models")
HEAD_CHANNELS, VOCABULARY = 8, 16
OPTIONS: Mapping[str, tuple[tuple[int, int], Mapping[str, Any]]] = {
    "zero bubble": ((1, 2), {"builder": "zb-h1"}),
    "ZeRO-3": ((1, 1), {"shards_weights": True}),
    "FP8": ((1, 1), {"dtype": torch.bfloat16, "fp8_recipe": "tensorwise"}),
    "tp 2": ((2, 1), {"sequence_parallel": True}),
}
"""(Tensor parallel size, the LLM's stages), and what else a case has."""
ROWS = {
    "plain": ("cornstarch-alm-l", "cornstarch-thesis-vlm-1b", "llama-3.2-vision-11b", "orchmllm-10b", "llava-onevision-7b"),
    "LoRA": ("llava-1.5-7b", "cornstarch-thesis-alm-1b", "cornstarch-thesis-vlm-32b", "orchmllm-18b", "qwen2.5-vl-7b"),
    "zero bubble": ("qwen3-vl-30b-a3b", "cornstarch-thesis-alm-32b", "cornstarch-vlm-l", "orchmllm-84b", "qwen2.5-vl-72b"),
    "ZeRO-3": ("mllm-9b", "cornstarch-thesis-valm-1b", "entrain-llama-1b", "qwen2-audio-7b", "vit-11b-gpt-175b"),
    "FP8": ("qwen2.5-omni-7b", "cornstarch-thesis-valm-32b", "entrain-llama-3b", "mllm-72b", "vit-11b-llama-70b"),
    "tp 2": ("qwen2.5-vl-3b", "cornstarch-valm-l", "internvl3-8b", "oobleck-bert-large", "vit-11b-vit-5b-gpt-175b"),
}
"""One model of every shape, by the option that it meets; the first ones are the most unlike."""


def _narrow_transformer(shape: Transformer, num_layers: int) -> Transformer:
    """As many query heads for a key as before, and an MLP that FP8 can have if it could."""
    heads = 2 * (shape.num_attention_heads // shape.query_groups)
    return replace(
        shape,
        num_layers=num_layers,
        hidden_size=heads * HEAD_CHANNELS // (1 if shape.kv_channels is None else 2),
        num_attention_heads=heads,
        num_query_groups=shape.num_query_groups and 2,
        kv_channels=shape.kv_channels and HEAD_CHANNELS,
        ffn_hidden_size=32 + shape.ffn_hidden_size % 16,
        rotary_base=10000.0,
        rotary_sections=shape.rotary_sections and (2, 1, 1),
        init_method_std=0.1,
        experts=shape.experts and replace(shape.experts, num_experts=4, router_topk=2, ffn_hidden_size=16),
    )


def _narrow_image(image: ImageInput) -> ImageInput:
    side, grid, deep = image.image_size and 4 * image.merge_size, image.position_grid and 3, len(image.deepstack_layers)
    small = replace(image, latents=None, patch_size=2, min_pixels=4, max_pixels=1024, image_size=side, position_grid=grid)
    return replace(small, deepstack_layers=tuple(range(deep)))


def _narrow_unit(unit: Unit, num_layers: int) -> Unit:
    return replace(
        unit,
        module=None,
        transformer=_narrow_transformer(unit.transformer, num_layers),
        image=unit.image and _narrow_image(unit.image),
        audio=unit.audio and replace(unit.audio, num_mel_bins=4, max_tokens=16),
        projector_hidden_size=unit.projector_hidden_size and 32,
        vocab_size=unit.vocab_size and VOCABULARY,
    )


def narrow(graph: ModelGraph) -> ModelGraph:
    """Return the model with few layers and small widths, and with everything else that it has."""
    num_layers = max(2, *(len(unit.deepstack_layers) for unit in graph.units))
    return replace(graph, units=tuple(_narrow_unit(unit, num_layers) for unit in graph.units))


def case_of_example(name: str, option: str) -> gradient_case.GradientCase:
    """Layers of Transformer Engine under an option, on two ranks or on one."""
    graph = narrow(read_model(EXAMPLES / f"{name}.yaml"))
    if option == "LoRA":
        graph = adapt_units(graph, linear_layers(graph), rank=2, alpha=None, targets=("transformer.*",))
    (tensor, stages), changes = OPTIONS.get(option, ((1, 1), {}))
    units = *graph.item_encoders, *graph.generators
    items = tuple((unit.name, 2, 2) if unit.image is not None else (unit.name, 4 * unit.merge_factor, 1) for unit in units)
    shapes = [SampleShape(items * count, 4 + count, 3) for count in (1, 2)]
    source = RandomSource(graph, (*shapes, SampleShape((), 4, 2)), VOCABULARY)
    sizes = {unit.name: UnitSizes(tensor, stages if unit is graph.backbone else 1) for unit in graph.units}
    plan = plan_colocated(graph, sizes=sizes, world_size=1 if option == "FP8" else 2)
    return gradient_case.GradientCase(
        graph, plan, dealt(source, plan, ([0], [1, 2])), source, transformer_impl="transformer_engine", **changes
    )


def second_step(case: gradient_case.GradientCase, folder: Path, resumes: bool) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of the second step of AdamW, and the weights behind it; a checkpoint of the first is saved, or resumed."""
    optimizer = build_optimizer_config(
        lr=RATE, min_lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=case.dtype
    )
    session = gradient_case.build_session(case, optimizer=optimizer)
    build_scheduler(OptimizerSettings(lr=RATE, min_lr=RATE), session, train_iters=2)
    if resumes:
        load_checkpoint(folder, session=session, load_optimizer=True, load_rng=True)
    for number in range(int(resumes), 2):
        session.zero_gradients()
        step = gradient_case.plan_case(case)
        loss = sum(session.forward_backward(step).loss_sums.values())
        session.finish_gradients()
        session.step_optimizers(session.gradient_norm(), gathers_later=step.cuts.gathers_parameters)
        session.complete_parameters()
        if number == 0:
            run = {"schedulers_state": {"num_steps": 1}, "run_state": {"seed": 0}}
            save_checkpoint(folder, step=1, session=session, keep_last=1, background=None, **run)
    with gradient_case.whole_weights(session):
        named = {f"{unit} {name}": each for (unit, _), stage in session.stages.items() for name, each in stage.named_parameters()}
        return loss, {name: each.detach().double().numpy() for name, each in named.items()}


LEARNING_RATE = 0.05
"""Of Adam: by how much every weight changes in a step."""
Weights = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a module that multiplies in FP8 -> its weight as a step found it, and as its products multiplied with it."""


def train_in_fp8(case: gradient_case.GradientCase, num_steps: int) -> list[Weights]:
    optimizer = build_optimizer_config(
        lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-8, clip_grad=0.0, dtype=case.dtype
    )
    session = gradient_case.build_session(case, optimizer=optimizer)
    build_scheduler(OptimizerSettings(lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=0.0), session, train_iters=num_steps)
    found = []
    for _ in range(num_steps):
        session.zero_gradients()
        modules = {name: module for stage in session.stages.values() for name, module in stage.named_modules()}
        multiplies = {name: module for name, module in modules.items() if hasattr(module, "_fp8_workspaces")}
        before = {name: _values(module.weight) for name, module in multiplies.items() if hasattr(module, "weight")}
        session.forward_backward(gradient_case.plan_case(case))
        session.finish_gradients()
        used = {name: weight for name in before if (weight := modules[name]._fp8_workspaces.get("weight")) is not None}
        found.append({name: (before[name], _values(numbers_of(weight))) for name, weight in used.items()})
        session.step_optimizers(session.gradient_norm(), gathers_later=False)
    return found


def _values(weight: Any) -> np.ndarray:
    values: torch.Tensor = weight.detach().float()
    return values.numpy().copy()


NAMES = ("vision", "llm")
BIASES = {"add_bias_linear": True, "add_qkv_bias": True, "normalization": "LayerNorm", "activation": "gelu"}
HEAD_NORMS = {"qk_layernorm": True}
ADAPTED = [f"transformer.linear_{name}" for name in ("qkv", "proj", "fc1", "fc2")]
ADAPTERS = {"llm": {"lora": {"rank": 2, "targets": ADAPTED}}}
EXPERTS = {"llm": {"experts": {"num_experts": 4, "aux_loss_coeff": 0.1, "ffn_hidden_size": 12}}}
VERSIONS = {folder.name: folder for folder in sorted(Path(os.environ.get(FOLDER, "none")).glob("*/"))}
WHOLE, WITHOUT_FP8 = "2.8.0", "2.20.2"
"""The version that every row runs with; and the one whose compiled module allocates tensors in FP8, as the stand-in does not."""


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
) -> gradient_case.GradientCase:
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


BUFFERS = {"tensor": 2, "sequence_parallel": True, "groups": ([0, 1, 2], [3], [4]), "buffer_rows": 24}
"""Of 22, 3 and 4 tokens, the first are padded to them."""
CASES = {
    "biases, head norms, split, tp 2": _case("zb-h1", shape={**BIASES, **HEAD_NORMS}, tensor=2),
    "adapters, split, sequence parallel": _case("zb-h1", units=ADAPTERS, tensor=2, sequence_parallel=True),
    "experts, split, tp 2": _case("zb-h1", units=EXPERTS, tensor=2, sequence_parallel=True),
    "experts shared by replicas, split": _case("zb-h1", units=EXPERTS, experts=2),
    "weights shared, split": _case("zb-h1", shape=BIASES, shards_weights=True),
    "user buffers, biases, recompute": _case("1f1b", shape=BIASES, recompute="full", **BUFFERS),
    "user buffers, frozen LLM": _case("gpipe", units={"llm": {"freeze_module": True}}, **BUFFERS),
    "frozen LLM, split": _case("zb-h1", shape=BIASES, units={"llm": {"freeze_module": True}}),
    "recompute attention": _case("1f1b", recompute="selective"),
}
FLOW = {"llm": UNITS["llm"], "painter": {**UNITS["painter"], **BIASES, "flow": {"condition_tokens": 2, "condition_dropout": 0.3}}}
CASES["modulated, split, tp 2"] = dealt_case(
    FLOW,
    Plan({"llm": unit_plan(0), "painter": unit_plan(1, tp=2)}),
    transformer_impl="transformer_engine",
    builder="zb-h1",
    sequence_parallel=True,
)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_local_layers(engine_ranks: EnginePool, name: str) -> None:
    assert_matches(CASES[name], engine_ranks)


def count_overlapped(case: gradient_case.GradientCase) -> int:
    before = CommOverlap.num_products
    gradient_case.run_on_rank(case)
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


def test_pieces_of_encoders_in_waits(engine_ranks: EnginePool) -> None:
    case = build_inside(2, PAIRS, sequence_parallel=True, transformer_impl="transformer_engine")
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
"""Three units, and what layers alone keep; test_checkpoint.py has experts."""


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
    exact = replace(gradient_case.reference_of(case), dtype=torch.float64, fp8_recipe=None)
    (found,), (expected,) = (
        engine_ranks.run(gradient_case.run_on_rank, case, world_size=1),
        engine_ranks.run(gradient_case.run_reference, exact, world_size=1),
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


def fp8_case(recipe: str, **described: Any) -> gradient_case.GradientCase:
    """An LLM of sizes that FP8 can have, on one rank."""
    shape = {"hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 4}
    units = {"llm": {**UNITS["llm"], **shape, **described}}
    plan = gradient_case.single_rank_plan(source_of(units).graph)
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


def test_a_recipe_that_the_gpu_does_not_have(engine_ranks: EnginePool) -> None:
    with pytest.raises(
        RankError, match="--fp8-recipe mxfp8: Device compute capability 10.0 or higher required .*; choose another"
    ):
        engine_ranks.run(train_in_fp8, fp8_case("mxfp8"), 1, world_size=1)


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
    (found,), (expected,) = (engine_ranks.run(gradient_case.run_on_rank, each, world_size=1) for each in cases)
    for key, gradient in expected.gradients.items():
        assert np.abs(found.gradients[key] - gradient).max() <= 0.01 * np.abs(gradient).max(), key
    (steps,) = engine_ranks.run(train_in_fp8, fp8_case("tensorwise", **{**narrow, "hidden_size": 128}), 1, world_size=1)
    assert {name.rpartition(".")[2] for name in steps[0]} == {"linear_qkv", "linear_proj"}


@pytest.mark.deep(when=lambda recipe: recipe == "delayed")  # its weights are held against their updates above
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_experts_in_fp8(engine_ranks, recipe):
    """Their gradients are those of bfloat16 but for the rounding, where other rows would be off by more than their size."""
    case = fp8_case(recipe, num_layers=1, experts={"num_experts": 4, "router_topk": 4})  # all: a choice may turn on a rounding
    (found,), (expected,) = (
        engine_ranks.run(gradient_case.run_on_rank, each, world_size=1) for each in (case, replace(case, fp8_recipe=None))
    )
    of_experts = [key for key in expected.gradients if ".mlp.experts." in key[1]]
    assert len(of_experts) == 4 * 2
    for key in of_experts:
        scale = np.linalg.norm(expected.gradients[key])
        assert 0.01 * scale < np.linalg.norm(found.gradients[key] - expected.gradients[key]) < 0.7 * scale, key
