"""The command line, the configuration file, and which of them wins."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.configuration import GROUPS, RunConfig
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ConfigError, ModelError, PlanError
from multimodal.values.model_graph import ModelGraph
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


def test_defaults(parse: Parse) -> None:
    config = parse()
    assert config.training.micro_batch_size == 1
    assert config.training.dtype == "float32"
    assert config.training.seed == 1234
    assert config.optimizer.lr == 0.001
    assert config.optimizer.lr_decay_iters == 10
    assert config.checkpoint.load_optim
    assert config.parallelism.units == {"vision": UnitSizes(data_parallel_size=1), "llm": UnitSizes()}
    assert config.given == {"model", "data_path", "lr", "train_iters", "global_batch_size", "vision.data_parallel_size"}


def test_without_a_configuration_file(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump({"units": {"llm": BACKBONE}}))
    flags = f"--model {model} --data-path digits --lr 1e-3 --train-iters 3 --global-batch-size 4 --llm-tp 2".split()
    config = parse_arguments(flags, environ={"WORLD_SIZE": "4"})
    assert build_plan(config, ModelGraph.from_file(config.model.model), 4).units["llm"].data_parallel_size == 2


def test_the_command_line_wins(parse: Parse) -> None:
    config = parse("--lr 0.5 --vision-dp 2", file={"vision_data_parallel_size": 1, "seed": 7}, world_size=3)
    assert (config.optimizer.lr, config.training.seed) == (0.5, 7)
    assert config.parallelism.units["vision"].data_parallel_size == 2


@pytest.mark.parametrize("key", ["micro-batch-size", "micro_batch_size", "--micro-batch-size"])
def test_keys_may_be_spelt_in_three_ways(parse: Parse, key: str) -> None:
    assert parse(file={key: 4, "vision-dp": 1}).training.micro_batch_size == 4


@pytest.mark.parametrize("text", ["1e-4", 1e-4, "0.0001"])
def test_numbers_of_a_configuration_file(parse: Parse, text: Any) -> None:
    assert parse(file={"lr": text, "vision-dp": 1}).optimizer.lr == 1e-4


def test_switches_and_lists_of_a_configuration_file(parse: Parse) -> None:
    file = {"recompute-activations": True, "progress-bar": False, "freeze": ["vision", "llm"], "bf16": False, "vision-dp": 1}
    config = parse(file=file)
    assert config.training.recompute_granularity == "selective"
    assert not config.logging.progress_bar
    assert config.model.freeze == ("vision", "llm")
    assert config.training.dtype == "float32"


@pytest.mark.parametrize(
    ("line", "file", "dtype"),
    [("--bf16", {}, "bfloat16"), ("--dtype float64", {"bf16": True}, "float64"), ("--no-bf16", {"bf16": True}, "float32")],
)
def test_a_shorthand_is_the_flag_that_it_stands_for(parse: Parse, line: str, file: dict[str, Any], dtype: str) -> None:
    assert parse(line, file={**file, "vision-dp": 1}).training.dtype == dtype


@pytest.mark.parametrize(
    "line", ["--tensor-model-parallel-size 2", "--llm-tensor-model-parallel-size 2", "--llm-tp 2", "--llm-tp 2 --language-tp 2"]
)
def test_the_backbone_answers_to_llm_and_to_its_name(parse: Parse, line: str) -> None:
    config = parse(line, file={"vision-dp": 1}, world_size=3, units={"vision": ENCODER, "language": BACKBONE})
    assert config.parallelism.units["language"] == UnitSizes(tensor_parallel_size=2)


def test_all_sizes_of_an_encoder(parse: Parse) -> None:
    line = "--vision-tp 2 --vision-pp 2 --vision-cp 1 --vision-data-parallel-size 2 --vision-micro-batch-size 6"
    config = parse(line, file={}, world_size=9)
    assert config.parallelism.units["vision"] == UnitSizes(2, 2, 1, 2)
    assert config.training.encoder_micro_batch_sizes == {"vision": 6}


def test_a_unit_name_with_an_underscore_has_dashes_in_its_flags(parse: Parse) -> None:
    config = parse("--low-res-dp 1", file={}, units={"low_res": ENCODER, "llm": BACKBONE})
    assert config.parallelism.units["low_res"].data_parallel_size == 1


def test_two_encoders_are_told_apart(parse: Parse) -> None:
    line = "--vision-dp 1 --audio-dp 2 --audio-micro-batch-size 3"
    config = parse(line, file={}, world_size=4, units={"vision": ENCODER, "audio": ENCODER, "llm": BACKBONE})
    assert [config.parallelism.units[name].data_parallel_size for name in ("vision", "audio", "llm")] == [1, 2, None]
    assert config.training.encoder_micro_batch_sizes == {"audio": 3}


def test_one_process_colocates_by_itself(parse: Parse) -> None:
    config = parse(file={}, world_size=1)
    plan = build_plan(config, ModelGraph.from_file(config.model.model), 1)
    assert plan.units["vision"].ranks == plan.units["llm"].ranks == (0,)


def test_colocated_units_on_the_command_line_set_data_parallel_sizes_of_the_file_aside(parse: Parse) -> None:
    config = parse("--colocate-units", file={"vision-dp": 1, "llm-tp": 2}, world_size=4)
    assert config.parallelism.units == {"vision": UnitSizes(), "llm": UnitSizes(tensor_parallel_size=2)}


def test_a_plan_on_the_command_line_sets_sizes_of_the_file_aside(parse: Parse, tmp_path: Path) -> None:
    config = parse()
    build_plan(config, ModelGraph.from_file(config.model.model), 2).to_file(tmp_path / "plan.yaml")
    with_plan = parse(f"--plan {tmp_path / 'plan.yaml'}", file={"vision-dp": 7, "llm-tp": 2})
    assert with_plan.parallelism.units["llm"] == UnitSizes()
    assert "vision.data_parallel_size" not in with_plan.given
    with pytest.raises(PlanError, match=r"plan\.yaml, line \d+: the plan uses 2 ranks but the run has 3"):
        parse(f"--plan {tmp_path / 'plan.yaml'}", world_size=3)


def test_sizes_beside_plan_auto_are_kept(parse: Parse) -> None:
    config = parse("--llm-tp 2 --micro-batch-size 4", file={"plan": "auto", "vision-pp": 2}, world_size=3)
    assert config.parallelism.plans_itself
    assert {"llm.tensor_parallel_size", "vision.pipeline_parallel_size", "micro_batch_size"} <= config.given


def test_plan_auto_on_the_command_line_overrules_a_file(parse: Parse) -> None:
    file = {"balance": "auto", "schedule": "gpipe", "vision-dp": 2, "micro-batch-size": 8, "recompute-granularity": "full"}
    config = parse("--plan auto --llm-tp 2", file=file, world_size=3)
    assert {"llm.tensor_parallel_size", "recompute_granularity"} <= config.given
    assert not config.given & {"balance", "schedule", "vision.data_parallel_size", "micro_batch_size"}


def test_flags_of_the_file_yield_to_the_command_line(parse: Parse) -> None:
    config = parse("--eval-iters 0", file={"eval-iters": 2, "eval-interval": 5, "vision-dp": 1})
    assert config.evaluation.eval_interval is None
    assert "eval_interval" not in config.given
    warm = parse("--lr-warmup-fraction 0.2", file={"lr-warmup-iters": 5, "vision-dp": 1})
    assert warm.optimizer.lr_warmup_iters == 2


def test_input_paths_are_found_beside_the_configuration_file(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").touch()
    config = parse(file={"data-path": "manifest.jsonl", "save": "runs", "vision-dp": 1})
    assert config.model.model == tmp_path / "model.yaml"
    assert config.data.data_path == (str(tmp_path / "manifest.jsonl"),)
    mixed = parse(file={"data-path": [0.5, "manifest.jsonl", 1, "elsewhere.jsonl"], "vision-dp": 1})
    assert mixed.data.mixture == ((str(tmp_path / "manifest.jsonl"), 0.5), ("elsewhere.jsonl", 1.0))
    assert config.checkpoint.save == Path("runs")
    assert parse(file={"data-path": "elsewhere.jsonl", "vision-dp": 1}).data.data_path == ("elsewhere.jsonl",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--qqq", "unknown flag --qqq; --help lists all flags"),
        ("--audio-tp 2", "unknown flag --audio-tp; the model's units are vision, llm"),
        ("--lr 1 2", "unexpected argument '2'"),
        ("--lr abc", "--lr: expected a number, found 'abc'"),
        ("--lr nan", "--lr: expected a number, found 'nan'"),
        ("--train-iters 1.5", "--train-iters: expected a whole number, found '1.5'"),
        ("--seq-length", "--seq-length: expected one argument"),
        ("--freeze", "--freeze: expected at least one argument"),
        ("--schedule zigzag", "--schedule: there is no schedule 'zigzag'; choose one of gpipe,"),
        ("--schedule dip:rounds=0", "--schedule: schedule 'dip:rounds=0': rounds takes a whole number of at least 1, found '0'"),
        ("--vision-tp 0", "--vision-tp: expected a whole number of at least 1, found 0"),
        ("--tensor-model-parallel-size 2 --llm-tp 1", "--tensor-model-parallel-size 2 and --llm-tp 1 set the same thing"),
        ("--bf16 --dtype float32", "--bf16 and --dtype float32 set the same thing"),
        ("--recompute-activations --recompute-granularity full", "set the same thing to different values"),
        ("--lr 1 --lr 2", "--lr 1.0 and --lr 2.0 set the same thing"),
        ("--freeze vision --freeze llm", "--freeze vision and --freeze llm set the same thing"),
        ("--colocate-units --no-colocate-units", "--colocate-units and --no-colocate-units set the same thing"),
    ],
)
def test_wrong_command_lines(parse: Parse, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse(line)
    assert message in str(problem.value)


def test_the_same_value_twice_is_fine(parse: Parse) -> None:
    assert parse("--bf16 --dtype bfloat16 --llm-tp 1 --tensor-model-parallel-size 1").training.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"learning-rate": 1}, "unknown flag --learning-rate"),
        ({"tain-iters": 1}, "did you mean --train-iters?"),
        ({"audio-tp": 1}, "the model's units are vision, llm"),
        ({"lr_decay_style": None}, "--lr-decay-style has no value"),
        ({"sequence-parallel": 3}, "--sequence-parallel is a switch: expected true or false, found 3"),
        ({"bf16": "maybe"}, "--bf16 is a switch: expected true or false, found 'maybe'"),
        ({"seed": True}, "--seed expects one value (N), found True"),
        ({"seed": [1, 2]}, "--seed expects one value (N), found [1, 2]"),
        ({"freeze": {"vision": True}}, "--freeze expects one or more of UNIT"),
        ({"freeze": ["vision", ["llm"]]}, "--freeze expects one or more of UNIT, found ['llm'] in its list"),
        ({"freeze": ["vision", "--lr", "3"]}, "--freeze expects one or more of UNIT, found '--lr' in its list"),
        ({"freeze": [None]}, "--freeze expects one or more of UNIT, found None in its list"),
        ({"lr": ".nan"}, "--lr: expected a number, found '.nan'"),
        ({"lr": float("inf")}, "--lr: expected a number, found 'inf'"),
        ({"seed": 1, "--seed": 2}, "--seed is there twice"),
        ({"llm-tp": 2, "tensor-model-parallel-size": 1}, "set the same thing to different values"),
        ({"config": "other.yaml"}, "--config cannot stand in a configuration file"),
        ({"help": True}, "--help cannot stand in a configuration file"),
    ],
)
def test_wrong_configuration_files_are_named(parse: Parse, file: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as problem:
        parse(file=file)
    assert message in str(problem.value)
    number = int(re.search(r"config\.yaml, line (\d+): ", str(problem.value))[1])
    line = (tmp_path / "config.yaml").read_text().splitlines()[number - 1]
    assert line.split(":")[0] in [str(key) for key in file]


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


def test_missing_flags_are_listed_together() -> None:
    with pytest.raises(
        ConfigError, match=r"missing --model FILE\.yaml, --global-batch-size N, --train-iters N, --lr X, --data-path"
    ):
        parse_arguments(["--vision-tp", "2"], environ={})


def test_an_unknown_flag_is_found_beside_flags_of_units_that_are_not_known_yet() -> None:
    with pytest.raises(ConfigError, match="unknown flag --tran-iters"):
        parse_arguments(["--vision-tp", "2", "--tran-iters", "5"], environ={})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "absent.yaml"], "absent.yaml: no such file"),
        (["--model", "absent.yaml"], "--model absent.yaml: no such file; give the path of an existing"),
        (["--model="], "--model : is a folder or a device"),
        (["--model"], "--model: expected one argument"),
    ],
)
def test_files_that_do_not_exist(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(flags, environ={})


@pytest.mark.parametrize("model", [None, True, ["model.yaml"]])
def test_a_model_entry_that_is_no_path(parse: Parse, model: Any) -> None:
    with pytest.raises(ConfigError, match="--model (has no value|expects one value)"):
        parse(file={"model": model})


@pytest.mark.parametrize("units", [{"llm": ENCODER, "text": BACKBONE}, {"a-b": ENCODER, "a_b": ENCODER, "llm": BACKBONE}])
def test_units_whose_flags_would_coincide(parse: Parse, units: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="would coincide with another unit's"):
        parse(units=units)


@pytest.mark.parametrize("text", ["0", "two", "", "1000000000000", "9" * 5000])
def test_a_wrong_world_size(parse: Parse, text: str) -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE must be the number of processes"):
        parse(world_size=text)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("flag", "exit_code"), [("--help", 0), ("--no-such-flag", 2)])
def test_help_and_a_wrong_flag_import_neither_torch_nor_megatron_core(flag: str, exit_code: int) -> None:
    program = f"""
import os, sys, pretrain_mllm
os._exit = sys.exit
try:
    pretrain_mllm.main(["{flag}"])
except SystemExit as ended:
    late = [name for name in sys.modules if name.split(".")[0] == "torch" or name.startswith("megatron.core")]
    print("ended with", ended.code, late)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    root = Path(__file__).parents[4]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.splitlines()[-1] == f"ended with {exit_code} []"
