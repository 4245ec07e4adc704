"""What predicted steps are told of a run."""

import re
from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.training.prediction import build_predictor, describe_better_pair
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.run_options import RunOptions
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

WIDE = {"num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 1024}
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}


def options_of(tmp_path: Path, line: str) -> RunOptions:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": {"llm": {"role": "backbone", **SHAPE}}}))
    flags = f"--model {tmp_path}/model.yaml --data-path digits --lr 1e-3 --train-iters 1 --global-batch-size 2 {line}"
    config = parse_arguments(flags.split(), environ={"WORLD_SIZE": "2"})
    graph = ModelGraph.from_file(config.model.model)
    plan = plan_disaggregated(graph, sizes=config.parallelism.units, world_size=2)
    return build_predictor(config, ScheduleCache(graph, plan, BUILDERS["1f1b"]), vocab_size=128).options


@pytest.mark.parametrize(
    ("line", "num_parts"), [("", 1), ("--tp-comm-overlap", 4), ("--tp-comm-overlap --tp-comm-overlap-parts 6", 6)]
)
def test_overlapped_parts(tmp_path: Path, line: str, num_parts: int) -> None:
    options = options_of(tmp_path, f"--llm-tp 2 {line}")
    assert options.num_overlapped_parts == num_parts
    assert options.transformer_impl == "local"


@pytest.mark.parametrize(
    ("line", "zero_stage"), [("", 1), ("--dtype float64", 0), ("--data-parallel-sharding-strategy optim_grads_params", 3)]
)
def test_what_replicas_share(tmp_path: Path, line: str, zero_stage: int) -> None:
    assert options_of(tmp_path, f"--llm-dp 2 {line}").zero_stage == zero_stage


def warning_of(tmp_path: Path, line: str) -> str | None:
    """Return what is said of a batch in which every other sample has a large image, on two ranks that units share."""
    units = {
        "vision": {"role": "encoder", **WIDE, "image": {"patch_size": 14, "merge_size": 2}},
        "llm": {"role": "backbone", **WIDE},
    }
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    flags = f"--model {tmp_path}/model.yaml --data-path digits --lr 1e-3 --train-iters 1 --global-batch-size 8 {line}"
    config = parse_arguments([*flags.split(), "--colocate-units"], environ={"WORLD_SIZE": "2"})
    graph = ModelGraph.from_file(config.model.model)
    plan = plan_colocated(graph, sizes=config.parallelism.units, world_size=2)
    schedules = ScheduleCache(graph, plan, BUILDERS[config.training.schedule])
    options = BalanceOptions(vocab_size=128, predictor=build_predictor(config, schedules, vocab_size=128))
    items = [(ItemLengths("vision", 1024, 256),) if index % 2 == 0 else () for index in range(8)]
    lengths = [SampleLengths(index, each, 20, 20) for index, each in enumerate(items)]
    return describe_better_pair(config, lengths, options=options)


def test_a_pair_that_is_clearly_worse_is_named_with_both_figures(tmp_path: Path) -> None:
    found = warning_of(tmp_path, "--balance none")
    pattern = (
        r"warning: with --balance none and --schedule 1f1b the first global batch is predicted to take (\S+) s, "
        r"with --balance whole-sample (\S+) s; change that flag, or leave it to --balance auto"
    )
    figures = re.fullmatch(pattern, found or "")
    assert figures and float(figures[1]) > 1.2 * float(figures[2])
    assert warning_of(tmp_path, "--balance whole-sample") is None
    assert warning_of(tmp_path, "--balance auto") is None
