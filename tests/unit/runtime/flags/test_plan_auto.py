"""`--plan auto` among the other flags: what it keeps and what it overrules."""

from pathlib import Path

import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
UNITS = {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}
REQUIRED = {"data-path": "digits", "lr": 1e-3, "train-iters": 10, "global-batch-size": 8}


def parse(folder: Path, line: str, **in_file: object) -> RunConfig:
    """Parse a line of flags with a configuration file."""
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": UNITS}, sort_keys=False))
    entries = {"model": "model.yaml", **REQUIRED, **{name.replace("_", "-"): value for name, value in in_file.items()}}
    (folder / "run.yaml").write_text(yaml.safe_dump(entries))
    return parse_arguments(["--config", str(folder / "run.yaml"), *line.split()], environ={"WORLD_SIZE": "3"})


def test_sizes_beside_it_are_kept(tmp_path: Path) -> None:
    config = parse(tmp_path, "--llm-tp 2 --micro-batch-size 4", plan="auto", vision_pp=2)
    assert config.parallelism.plans_itself
    assert {"llm.tensor_parallel_size", "vision.pipeline_parallel_size", "micro_batch_size"} <= config.given


def test_on_the_command_line_it_overrules_a_file(tmp_path: Path) -> None:
    in_file = {"balance": "auto", "schedule": "gpipe", "vision_dp": 2, "micro_batch_size": 8, "recompute_granularity": "full"}
    config = parse(tmp_path, "--plan auto --llm-tp 2", **in_file)
    assert {"llm.tensor_parallel_size", "recompute_granularity"} <= config.given
    assert not config.given & {"balance", "schedule", "vision.data_parallel_size", "micro_batch_size"}
