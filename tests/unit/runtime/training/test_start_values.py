"""Before a run's first step: what ranks must agree on, what it starts from, how its layers are cut, and with which kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.configuration import CheckpointConfig, RunConfig
from megatron.runtime.flags.field_flags import all_flags
from megatron.runtime.launch.distributed_setup import StartValues, describe_difference, digest_of
from megatron.runtime.training import run
from megatron.runtime.training.describe_run import _shown_stages
from megatron.runtime.training.prediction import predict_layer_seconds
from megatron.runtime.training.resumption import Start, choose_start
from megatron.runtime.training.start_values import BY_CONTENT, MAY_DIFFER, collect_start_values
from multimodal.plan.plans_of_sizes import EVEN
from multimodal.values.errors import CheckpointError, ConfigError
from multimodal.values.model_graph import ModelGraph
from tests.unit.runtime.training.conftest import open_example

EXAMPLE = Path(__file__).parents[4] / "examples" / "digits"


def values_of(*flags: str) -> StartValues:
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml"), *flags], environ={"WORLD_SIZE": "4"})
    return values_of_config(config)


def values_of_config(config: RunConfig) -> StartValues:
    graph = ModelGraph.from_file(config.model.model)
    data = build_data_sets(config, graph)
    return collect_start_values(config, graph=graph, plan=build_plan(config, graph, 4), data=data, vocab_size=384)


@pytest.fixture(scope="module")
def first() -> StartValues:
    return values_of()


def test_the_same_flags_give_the_same_digest(first: StartValues) -> None:
    again = values_of()
    assert digest_of(again) == digest_of(first)
    assert describe_difference(first, there=again, rank=3) == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--lr", "0.5"), "rank 3 was started with --lr 0.5, rank 0 with --lr "),
        (("--freeze", "vision"), "rank 3 was started with --freeze vision, rank 0 without --freeze; start"),
        (("--no-load-rng", "--load", "x"), "rank 3 was started with --load x, rank 0 without --load; start"),
        (("--no-load-optim", "--load", "x"), "rank 3 was started with --load x, rank 0 without --load; start"),
        (("--attention-mask", "prefix"), "with --attention-mask prefix, rank 0 with --attention-mask causal; start"),
        (("--vision-micro-batch-size", "2"), "rank 3 was started with --vision-micro-batch-size 2, rank 0 "),
        (("--no-eval-blank-images",), "started without --eval-blank-images, rank 0 with --eval-blank-images; start"),
    ],
)
def test_another_flag_is_named(first: StartValues, flags: tuple[str, ...], says: str) -> None:
    other = values_of(*flags)
    assert digest_of(other) != digest_of(first)
    assert says in describe_difference(first, there=other, rank=3)


def test_every_field_is_compared_unless_the_tables_say_otherwise(first: StartValues) -> None:
    names = {flag.name for flag in all_flags()}
    assert names - MAY_DIFFER - BY_CONTENT <= set(first["flags"])
    assert names >= MAY_DIFFER
    assert names >= BY_CONTENT


def test_what_rank_0_alone_reports_may_differ(first: StartValues) -> None:
    assert digest_of(values_of("--log-json", "other.jsonl", "--peak-tflops", "3")) == digest_of(first)


def test_a_unit_that_one_rank_lacks_is_named(first: StartValues) -> None:
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml")], environ={"WORLD_SIZE": "4"})
    sizes = dict(config.parallelism.units)
    sizes["llm"] = replace(sizes["llm"], tensor_parallel_size=2, pipeline_parallel_size=1)
    other = values_of_config(replace(config, parallelism=replace(config.parallelism, units=sizes)))
    said = describe_difference(first, there=other, rank=1)
    assert said.startswith("rank 1 was started with --llm-tensor-model-parallel-size 2, rank 0 with"), said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`full` holds a checkpoint, `own` holds one, too; `empty` none."""
    for path in ("full/step_00000005", "own/step_00000002", "empty"):
        (tmp_path / path).mkdir(parents=True)
    return tmp_path


def start_of(folder: Path, **flags: Any) -> Start | None:
    places = {name: folder / value if isinstance(value, str) else value for name, value in flags.items()}
    return choose_start(CheckpointConfig(**places))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"save": "own"}, None),
        ({"load": "full"}, ("full", "--load", True)),
        ({"load": "full", "save": "empty"}, ("full", "--load", True)),
        ({"load": "own", "save": "own"}, ("own", "--load", True)),
        ({"load": "empty", "save": "empty"}, None),
        ({"finetune": True, "load": "full"}, ("full", "--load", False)),
        ({"finetune": True, "load": "full", "save": "empty"}, ("full", "--load", False)),
        ({"finetune": True, "load": "full", "save": "own"}, ("own", "--save", True)),
        ({"finetune": True, "load": "gone", "save": "own"}, ("own", "--save", True)),
        ({"pretrained_checkpoint": "full"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "save": "own"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "load": "empty", "save": "empty"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "load": "own", "save": "own"}, ("own", "--load", True)),
    ],
)
def test_what_a_run_starts_from(folder: Path, flags: dict[str, Any], expected: tuple[str, str, bool] | None) -> None:
    assert start_of(folder, **flags) == (None if expected is None else Start(folder / expected[0], *expected[1:]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"load": "empty"}, "--load {}/empty: no complete checkpoint there; give a folder that --save wrote to, or leave"),
        ({"load": "gone", "save": "own"}, "--load {}/gone: no complete checkpoint there"),
        ({"finetune": True, "load": "empty"}, "--load {}/empty: no complete checkpoint there"),
        ({"finetune": True, "load": "gone", "save": "empty"}, "--load {}/gone: no complete checkpoint there"),
        ({"pretrained_checkpoint": "empty"}, "--pretrained-checkpoint {}/empty: no complete checkpoint there"),
        (
            {"pretrained_checkpoint": "gone", "load": "empty", "save": "empty"},
            "--pretrained-checkpoint {}/gone: no complete checkpoint there",
        ),
    ],
)
def test_a_folder_that_should_hold_a_checkpoint(folder: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as problem:
        start_of(folder, **flags)
    assert str(problem.value).startswith(message.format(folder))


LARGE_VOCABULARY = "--make-vocab-size-divisible-by 65536"
"""Its head costs more than all transformer layers."""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--llm-pp 3", ", 2 + 2 + 2 layers"),
        (f"--llm-pp 3 {LARGE_VOCABULARY}", ", 2 + 3 + 1 layers"),
        (f"--llm-pp 3 {LARGE_VOCABULARY} --layer-partition even", ", 2 + 2 + 2 layers"),
        (f"--llm-pp 2 --schedule interleaved-1f1b --llm-vpp 2 {LARGE_VOCABULARY}", ", 2 + 2 + 1 + 1 layers"),
        (
            f"--llm-pp 3 --schedule interleaved-1f1b --llm-num-layers-per-virtual-pipeline-stage 1 {LARGE_VOCABULARY}",
            ", 1 + 1 + 1 + 1 + 1 + 1 layers",
        ),
        ("--llm-pp 1", ""),
    ],
)
def test_stages_have_layers_by_their_seconds(line: str, shown: str) -> None:
    config, inputs = open_example(line)
    units = build_plan(config, inputs.graph, 8, layer_seconds=predict_layer_seconds(config, inputs)).units
    assert _shown_stages(inputs.graph.backbone, units["llm"]) == shown
    assert _shown_stages(inputs.graph.unit("vision"), units["vision"]) == ""


def test_a_frozen_unit_takes_what_is_left_of_it() -> None:
    """A frozen encoder's layers have no backward; its projector, in the same stage as the last of them, has one."""
    sizes = "--vision-pp 2 --vision-dp 1 --llm-pp 3"
    runs = [open_example(f"{sizes} {flags}") for flags in ("", "--freeze vision", "--recompute-granularity full")]
    trained, frozen, repeated = (predict_layer_seconds(*each)["vision"] for each in runs)
    assert trained[1] > 2.5 * frozen[1] > 0 and trained[-1] >= frozen[-1] > 0
    assert repeated[1] == pytest.approx(trained[1] + frozen[1])


def test_nothing_is_counted_where_nothing_is_cut() -> None:
    assert predict_layer_seconds(*open_example("--llm-pp 1")) is EVEN


@pytest.mark.parametrize(("has_gpus", "is_allowed"), [(False, False), (True, True), (True, False)])
def test_on_gpus_python_references_must_be_allowed(monkeypatch: pytest.MonkeyPatch, has_gpus: bool, is_allowed: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    run.check_kernels(is_allowed=is_allowed)
    monkeypatch.setattr(run, "kernels", None)
    if is_allowed or not has_gpus:
        run.check_kernels(is_allowed=is_allowed)
        return
    with pytest.raises(ConfigError, match="without --allow-python-kernels GPUs do not wait for decisions by"):
        run.check_kernels(is_allowed=False)
