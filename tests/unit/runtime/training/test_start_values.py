"""Before a run's first step: what ranks must agree on, what it starts from, how its layers are cut, and with which kernels."""

from dataclasses import replace
from functools import cache
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
from megatron.runtime.training.resumption import choose_start
from megatron.runtime.training.start_values import BY_CONTENT, MAY_DIFFER, collect_start_values
from multimodal.plan.plans_of_sizes import EVEN
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.runtime.training.conftest import open_example

EXAMPLE = Path(__file__).parents[4] / "examples" / "digits"


def values_of(*flags: str) -> StartValues:
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml"), *flags], environ={"WORLD_SIZE": "4"})
    return values_of_config(config)


def values_of_config(config: RunConfig) -> StartValues:
    graph = ModelGraph.from_file(config.model.model)
    data = build_data_sets(config, graph)
    return collect_start_values(config, graph=graph, plan=build_plan(config, graph, 4), data=data, vocab_size=384)


@cache
def first() -> StartValues:
    return values_of()


def compare_start(document: dict[str, str]) -> str:
    """Return what rank 0 says to a rank 3 that was started with other flags."""
    there = values_of(*document["flags"].split())
    said = describe_difference(first(), there=there, rank=3)
    assert (digest_of(there) == digest_of(first())) == (said == "")
    return said or "alike"


def test_every_field_is_compared_unless_the_tables_say_otherwise() -> None:
    names = {flag.name for flag in all_flags()}
    assert names - MAY_DIFFER - BY_CONTENT <= set(first()["flags"])
    assert names >= MAY_DIFFER
    assert names >= BY_CONTENT


def test_a_unit_that_one_rank_lacks_is_named() -> None:
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml")], environ={"WORLD_SIZE": "4"})
    sizes = dict(config.parallelism.units)
    sizes["llm"] = replace(sizes["llm"], tensor_parallel_size=2, pipeline_parallel_size=1)
    other = values_of_config(replace(config, parallelism=replace(config.parallelism, units=sizes)))
    said = describe_difference(first(), there=other, rank=1)
    assert said.startswith("rank 1 was started with --llm-tensor-model-parallel-size 2, rank 0 with"), said


def start_in_folders(document: dict[str, Any]) -> str:
    """Choose where a run starts; `full` and `own` hold a checkpoint each, `empty` none."""
    for path in ("full/step_00000005", "own/step_00000002", "empty"):
        Path(path).mkdir(parents=True, exist_ok=True)
    Path("full/step_00000005/braid.json").touch()
    places = {name: Path(value) if isinstance(value, str) else value for name, value in document.items()}
    start = choose_start(CheckpointConfig(**places))
    if start is None:
        return "from nothing"
    return f"{start.folder}, as {start.flag} says, {'to go on' if start.is_resumption else 'weights alone'}"


def cut_into_stages(document: dict[str, str]) -> str:
    config, inputs = open_example(document["flags"])
    units = build_plan(config, inputs.graph, 8, layer_seconds=predict_layer_seconds(config, inputs)).units
    return "; ".join(f"{name}{_shown_stages(inputs.graph.unit(name), unit)}" for name, unit in units.items())


STARTS: Kinds = {
    "flags of rank 3": ({"flags": ""}, compare_start),
    "folders": ({}, start_in_folders),
    "layers of stages": ({"flags": ""}, cut_into_stages),
}
test_every_start_is_as_written = golden_test("starts.txt", STARTS)


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
