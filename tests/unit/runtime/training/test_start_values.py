"""What ranks compare before they start, and what is said of a difference."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags
from megatron.runtime.launch.distributed_setup import StartValues, describe_difference, digest_of
from megatron.runtime.training.start_values import BY_CONTENT, MAY_DIFFER, collect_start_values
from multimodal.values.model_graph import ModelGraph

EXAMPLE = Path(__file__).parents[4] / "examples" / "digits"


def values_of(*flags: str) -> StartValues:
    """What a rank of the example would bring."""
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml"), *flags], environ={"WORLD_SIZE": "4"})
    return values_of_config(config)


def values_of_config(config: RunConfig) -> StartValues:
    """The same of a configuration."""
    graph = ModelGraph.from_file(config.model.model)
    data = build_data_sets(config, graph)
    return collect_start_values(config, graph=graph, plan=build_plan(config, graph, 4), data=data, vocab_size=384)


@pytest.fixture(scope="module")
def first() -> StartValues:
    """Of rank 0."""
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


def test_switches_are_shown_as_they_are_typed(first: StartValues) -> None:
    assert first["flags"]["sequence_parallel"] == "without --sequence-parallel"
    assert first["flags"]["load_optim"] == "without --no-load-optim"


def test_what_rank_0_alone_reports_may_differ(first: StartValues) -> None:
    assert digest_of(values_of("--log-json", "other.jsonl", "--peak-tflops", "3")) == digest_of(first)


def test_a_unit_that_one_rank_lacks_is_named(first: StartValues) -> None:
    config = parse_arguments(["--config", str(EXAMPLE / "config.yaml")], environ={"WORLD_SIZE": "4"})
    sizes = dict(config.parallelism.units)
    sizes["llm"] = replace(sizes["llm"], tensor_parallel_size=2, pipeline_parallel_size=1)
    other = values_of_config(replace(config, parallelism=replace(config.parallelism, units=sizes)))
    said = describe_difference(first, there=other, rank=1)
    assert said.startswith("rank 1 was started with --llm-tensor-model-parallel-size 2, rank 0 with"), said
