"""The command line, the configuration file, and which of them wins."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, parse_arguments, with_epochs
from megatron.runtime.flags.configuration import GROUPS, ModelConfig, ParallelismConfig, RunConfig, TrainingConfig
from megatron.runtime.flags.field_flags import field_docstrings, field_flags
from megatron.runtime.flags.flag_parser import FlagParser, explain_unknown
from megatron.runtime.flags.megatron_flags import megatron_flags
from multimodal.attention.attention_backend import _FUNCTIONS, AUTO, FLASH, SEQUENCES
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import Granularity, MicrobatchCount
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.plan.planners.planned_run import Sharding
from multimodal.plan.plans_of_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.values.errors import ConfigError, ModelError, PlanError
from multimodal.values.model_graph import ModelGraph, Transformer, Unit
from tests.sanity.flag_tables import PAGE, phrases, with_tables
from tests.sanity.repository import ROOT
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER

REQUIRED = {"data-path": "digits", "lr": 0.001, "train-iters": 10, "global-batch-size": 8}

Parse = Callable[..., RunConfig]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    """Parse a line of flags; `file` becomes the configuration file, `units` the model file that it names."""

    def run(
        line: str = "", *, file: Mapping[str, Any] | None = None, world_size: int = 2, units: Mapping[str, Any] | None = None
    ) -> RunConfig:
        (tmp_path / "model.yaml").write_text(
            yaml.safe_dump({"units": units or {"vision": ENCODER, "llm": BACKBONE}}, sort_keys=False)
        )
        entries = (
            {"model": "model.yaml", "vision-dp": 1, **REQUIRED} if file is None else {"model": "model.yaml", **REQUIRED, **file}
        )
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(entries))
        return parse_arguments(
            ["--config", str(tmp_path / "config.yaml"), *line.split()], environ={"WORLD_SIZE": str(world_size)}
        )

    return run


def test_epochs_become_steps_once_the_samples_are_counted(parse: Parse) -> None:
    config = parse("--num-epochs 2.5 --lr-warmup-fraction 0.4")  # in place of the file's --train-iters
    graph = ModelGraph.from_file(config.model.model)
    found = with_epochs(config, graph=graph, num_samples=20)
    assert (found.training.train_iters, found.optimizer.lr_decay_iters, found.optimizer.lr_warmup_iters) == (7, 7, 2)
    with pytest.raises(ConfigError, match="--lr-warmup-iters 7 leaves no step for the decay"):
        with_epochs(parse("--num-epochs 2.5 --lr-warmup-iters 7"), graph=graph, num_samples=20)


def test_one_process_colocates_by_itself(parse: Parse) -> None:
    config = parse(file={}, world_size=1)
    plan = build_plan(config, ModelGraph.from_file(config.model.model), 1)
    assert plan.units["vision"].ranks == plan.units["llm"].ranks == (0,)


def test_a_plan_on_the_command_line_sets_sizes_of_the_file_aside(parse: Parse, tmp_path: Path) -> None:
    config = parse()
    build_plan(config, ModelGraph.from_file(config.model.model), 2).to_file(tmp_path / "plan.yaml")
    with_plan = parse(f"--plan {tmp_path / 'plan.yaml'}", file={"vision-dp": 7, "llm-tp": 2})
    assert with_plan.parallelism.units["llm"] == UnitSizes()
    assert "vision.data_parallel_size" not in with_plan.given
    with pytest.raises(PlanError, match=r"plan\.yaml, line \d+: the plan uses 2 ranks but the run has 3"):
        parse(f"--plan {tmp_path / 'plan.yaml'}", world_size=3)


def test_input_paths_are_found_beside_the_configuration_file(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").touch()
    config = parse(file={"data-path": "manifest.jsonl", "save": "runs", "vision-dp": 1})
    assert config.model.model == tmp_path / "model.yaml"
    assert config.data.data_path == (str(tmp_path / "manifest.jsonl"),)
    mixed = parse(file={"data-path": [0.5, "manifest.jsonl", 1, "elsewhere.jsonl"], "vision-dp": 1})
    assert [each.path for each in mixed.data.mixture] == [str(tmp_path / "manifest.jsonl"), "elsewhere.jsonl"]
    assert config.checkpoint.save == Path("runs")
    assert parse(file={"data-path": "elsewhere.jsonl", "vision-dp": 1}).data.data_path == ("elsewhere.jsonl",)


def test_words_of_a_file_are_data_in_place_of_those_of_the_configuration(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("0.7 a.jsonl\n0.3 b.jsonl\n")
    config = parse(f"--data-args-path {tmp_path / 'data.txt'}")
    assert [(each.path, each.weight) for each in config.data.mixture] == [("a.jsonl", 0.7), ("b.jsonl", 0.3)]
    (tmp_path / "data.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"data.txt: is empty; write what --data-path takes into it"):
        parse(f"--data-args-path {tmp_path / 'data.txt'}")


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1\nseed: 2\nlr: 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 3: .*'lr' is there twice, first on line 1; keep one"):
        parse_arguments(["--config", str(tmp_path / "config.yaml")], environ={})


@pytest.mark.parametrize("content", [b"", b"lr: \xff", b"- lr", b"lr: " + b"[" * 9999, b"\x00", b"3: 4", b"lr: 1" + b"0" * 5000])
@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    for flag, error in (("--config", ConfigError), ("--model", ModelError)):
        with pytest.raises(error, match=re.escape(str(tmp_path / name))):
            parse_arguments([flag, str(tmp_path / name)], environ={})


def test_a_json_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"units": {"llm": BACKBONE}}))
    (tmp_path / "config.json").write_text(json.dumps({"model": "model.json", **REQUIRED, "lr": 1e-05}, indent="\t"))
    assert parse_arguments(["--config", str(tmp_path / "config.json")], environ={}).optimizer.lr == 1e-05


def test_help_is_grouped_and_shows_the_units_of_the_model(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for name in (*GROUPS, "parallelism of unit 'vision' (encoder)", "parallelism of unit 'llm' (backbone)"):
        assert f"\n{name}:\n" in shown
    assert "--vision-tensor-model-parallel-size N, --vision-tp N" in shown
    assert "--tensor-model-parallel-size N, --llm-tensor-model-parallel-size N, --llm-tp N" in shown
    assert "--no-bf16" not in shown


def test_help_without_a_model_says_how_to_see_the_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], environ={})
    assert "Give --model or --config along with --help" in " ".join(capsys.readouterr().out.split())


LISTS_NAMES = "tools.balance tools.emulate tools.lengths tools.plan tools.profile_layers tools.simulate tools.trace"
LISTS_FLAGS = "tools.cache_latents tools.convert tools.from_megatron tools.generate tools.index_data tools.launch tools.producer"


@pytest.mark.parametrize("names", ["pretrain_mllm", LISTS_FLAGS, LISTS_NAMES])
def test_help_and_a_wrong_flag_import_nothing_that_computes(names: str) -> None:
    late = "torch.", "scipy.", "rich.", "megatron.core.", "multimodal.plan.planners.search.", "numpy.", "importlib.metadata."
    program = f"""
import importlib, os, sys
os._exit = sys.exit
for name in "{names}".split():
    for flag in ("--help", "--no-such-flag")[: 1 + (name == "pretrain_mllm")]:
        try:
            sys.exit(importlib.import_module(name).main([flag]))
        except SystemExit as ended:
            late = [name for name in sys.modules if f"{{name}}.".startswith({late[:5] if names == LISTS_NAMES else late})]
            assert (ended.code, late) == (2 * (flag != "--help"), []), (name, flag, ended.code, late)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)


GRAPH = ModelGraph.from_dict({"units": {"vision": {**ENCODER, "image": {}}, "language": BACKBONE}})
SPELLINGS = frozenset(FlagParser(GRAPH).actions)
ANSWERED = megatron_flags()
OF_MEGATRON = (table for name, table in ANSWERED.items() if name not in ("known_elsewhere", "multimodal"))
LISTED = [pattern for table in OF_MEGATRON for names in table.values() for pattern in names.split()]
LIST_FLAGS = """
import argparse
from megatron.training.arguments import add_megatron_arguments
for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
    print(*action.option_strings, sep="\\n")
"""


def test_a_letter_left_out_of_a_long_flag_is_found() -> None:
    for spelling in sorted(spelling for spelling in SPELLINGS if len(spelling) > 12)[::4]:
        said = explain_unknown(spelling[:3] + spelling[4:], spellings=SPELLINGS, graph=GRAPH)
        assert "did you mean --" in said, spelling


def is_listed(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def test_no_flag_of_braid_is_listed_and_none_is_listed_twice() -> None:
    assert not [spelling for spelling in SPELLINGS if is_listed(spelling[2:], LISTED)]
    assert len(LISTED) == len(set(LISTED))


def test_answers_name_flags_and_keys_that_exist() -> None:
    spellings = SPELLINGS | set(FlagParser(None).actions)
    answers = [
        word.strip("();,.")
        for name, table in ANSWERED.items()
        if name != "in_model_file"
        for words in table
        for word in words.split()
    ]
    named = [word for word in answers if word.startswith("--")]
    assert len(named) > 40
    assert set(named) <= spellings
    assert set(ANSWERED["in_model_file"]) <= {field.name for kind in (Transformer, Unit) for field in dataclasses.fields(kind)}


def test_megatron_s_switches_freeze_units() -> None:
    flags = ["--freeze-LM", "--freeze-ViT", "--freeze", "language", "--freeze-vision-projection", "--lr", "1"]
    given = FlagParser(GRAPH).parse_given(flags)
    assert (set(given["freeze"]), given["freeze_projector"]) == ({"vision", "language"}, ("vision",))
    text = ModelGraph.from_dict({"units": {"llm": BACKBONE}})
    with pytest.raises(ConfigError, match="--freeze-ViT: the model has no encoder of images"):
        FlagParser(text).parse_given(["--freeze-ViT"])


def test_every_listed_flag_is_one_of_the_installed_megatron_s() -> None:
    if find_spec("megatron.training") is None:
        pytest.skip("this megatron-core comes without megatron.training")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.run(
        [sys.executable, "-c", LIST_FLAGS], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    installed = {line[2:] for line in shown.stdout.splitlines() if line.startswith("--")}
    assert [pattern for pattern in LISTED if not any(fnmatchcase(name, pattern) for name in installed)] == []
    unanswered = [name for name in installed if not is_listed(name, LISTED) and f"--{name}" not in SPELLINGS]
    assert len(unanswered) < len(installed) / 10


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python -m tests.sanity.flag_tables"
    in_one_line = " ".join(text.split())
    assert [phrase for phrase in phrases() if phrase not in in_one_line] == []


@pytest.mark.parametrize("group", GROUPS.values())
def test_every_field_has_a_docstring(group: type) -> None:
    assert set(field_docstrings(group)) == {field.name for field in dataclasses.fields(group)}
    assert all(text.endswith(".") for text in field_docstrings(group).values())


def choices(group: type, name: str) -> set[Any]:
    """What a field may be, None apart."""
    hint = get_type_hints(group)[name]
    return {choice for part in (hint, *get_args(hint)) for choice in get_args(part) if isinstance(choice, str)}


def test_balance_and_schedule_offer_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "mine", BUILDERS["1f1b"])
    monkeypatch.setitem(BALANCERS, "mine", BALANCERS["none"])
    monkeypatch.setitem(PASSES, "mine", PASSES["fill"])
    flags = {flag.name: flag for flag in field_flags("training")}
    assert flags["schedule"].choices == tuple(BUILDERS) and "mine" in flags["schedule"].choices
    assert flags["balance"].choices == tuple(BALANCERS)
    assert flags["schedule_passes"].help.endswith(f": {', '.join(PASSES)}.")


def test_other_choices_are_those_of_what_they_choose() -> None:
    assert choices(ModelConfig, "attention_backend") == {AUTO, SEQUENCES, FLASH, *_FUNCTIONS}
    assert choices(ModelConfig, "attention_mask") == set(MaskMode)
    assert choices(ModelConfig, "transformer_impl") == set(get_args(Implementation))
    assert choices(ParallelismConfig, "context_parallel_distribution") == set(TokenDistribution)
    assert choices(ParallelismConfig, "data_parallel_sharding_strategy") == set(get_args(Sharding))
    assert choices(TrainingConfig, "balance_granularity") == set(Granularity)
    assert choices(TrainingConfig, "balance_num_microbatches") == set(MicrobatchCount)
    assert choices(TrainingConfig, "recompute_granularity") == set(get_args(Recompute))
