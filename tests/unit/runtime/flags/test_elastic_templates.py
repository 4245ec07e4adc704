"""What --elastic refuses, and what it says would work."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.values.errors import BraidError, ConfigError, PlanError
from tests.unit.plan.planners.templates.test_plan_nodes import GRAPH, ONE_NODE

FLAGS = {"--data-path": "digits", "--global-batch-size": 8, "--train-iters": 2, "--lr": 0.1, "--dtype": "float32"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(GRAPH.to_dict(), sort_keys=False))
    return path


def parse(model: Path, *flags: object, world_size: int = 8):
    pairs = {**FLAGS, "--model": model, **dict(zip(flags[::2], flags[1::2], strict=True))}
    given = ["--elastic", *(str(word) for pair in pairs.items() for word in pair)]
    return parse_arguments(given, environ={"WORLD_SIZE": str(world_size)})


def write(model: Path, **changes: object) -> Path:
    path = model.with_name("templates.yaml")
    replace(ONE_NODE, **changes).to_file(path)
    return path


def test_templates_that_fit_are_taken(model: Path) -> None:
    config = parse(model, "--plan", write(model), "--fault-tolerance", 0)
    assert config.parallelism.elastic and config.parallelism.fault_tolerance == 0


@pytest.mark.parametrize(
    ("changes", "flags", "world_size", "error", "message"),
    [
        ({}, ("--fault-tolerance", 2), 8, ConfigError, "needs 3 replicas at all times.*plan them with --fault-tolerance 2"),
        ({}, (), 6, ConfigError, "start on 4 nodes of 2 GPUs, but 6 processes were started; start scripts/elastic.sh"),
        ({}, ("--global-batch-size", 12), 8, ConfigError, "share out 8 samples; give --global-batch-size 8"),
        ({}, ("--micro-batch-size", 2), 8, ConfigError, "planned for 1; give --micro-batch-size 1"),
        ({"recompute_granularity": "full"}, (), 8, ConfigError, "recomputing full.*give --recompute-granularity full"),
        ({}, ("--data-parallel-sharding-strategy", "optim_grads_params"), 8, ConfigError, "needs whole weights on every replica"),
        ({}, ("--lengths-from", "decode"), 8, ConfigError, "use --lengths-from index"),
    ],
)
def test_what_does_not_fit_is_refused(model: Path, changes, flags, world_size, error: type[BraidError], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(model, "--plan", write(model, **changes), *flags, world_size=world_size)


def test_without_templates_it_says_how_to_get_them(model: Path) -> None:
    with pytest.raises(ConfigError, match="--elastic needs templates.*--planner oobleck"):
        parse(model)
    plan = model.with_name("plan.yaml")
    plan.write_text("units: {}\n")
    with pytest.raises(PlanError, match="holds one plan, which fits one number of nodes.*--planner oobleck"):
        parse(model, "--plan", plan)


def test_its_flags_alone_would_be_ignored(model: Path) -> None:
    flags = [str(word) for pair in FLAGS.items() for word in pair]
    with pytest.raises(ConfigError, match="--elastic-timeout would be ignored.*add --elastic"):
        parse_arguments([*flags, "--model", str(model), "--elastic-timeout", "5"], environ={"WORLD_SIZE": "1"})
