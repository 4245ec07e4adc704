"""Schedules, passes and virtual stages against each other and the plan: as flags, with their messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from multimodal.cost.cluster import Cluster
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from tests.sanity.repository import ROOT
from tests.unit.runtime.flags.conftest import Parse

SHAPE = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
LLM = {"llm": {"role": "backbone", **SHAPE}}
UNITS = {"vision": {"role": "encoder", **SHAPE}, **LLM}
MORE_UNITS = {"vision": {"role": "encoder", **SHAPE}, "audio": {"role": "encoder", **SHAPE}, **LLM}
BASE = "--data-path digits --lr 1e-3 --train-iters 10 --global-batch-size 8"
SCHEDULE = "--schedule interleaved-1f1b"
CLUSTER = ROOT / "examples" / "clusters" / "h100.yaml"


@pytest.fixture
def parse(parse_on_base: Parse) -> Parse:
    """Parse a line of flags for models of eight layers, by default for three processes."""

    def run(line: str = "", *, world_size: int = 3, units: Mapping[str, Any] = UNITS) -> RunConfig:
        return parse_on_base(line, world_size=world_size, units=units)

    return run


def plan_of(config: RunConfig, world_size: int) -> Plan:
    return build_plan(config, ModelGraph.from_file(config.model.model), world_size)


@pytest.mark.parametrize(
    "flags",
    [
        "--llm-virtual-pipeline-model-parallel-size 2",
        "--llm-vpp 2",
        "--virtual-pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--llm-num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 2",
        "--llm-num-layers-per-virtual-pipeline-stage 2",
    ],
)
def test_flags_make_virtual_stages(parse: Parse, flags: str) -> None:
    config = parse(f"--llm-pp 2 {SCHEDULE} {flags}")
    stages = plan_of(config, 3).units["llm"].replicas[0].stages
    assert [stage.layer_ranges for stage in stages] == [((0, 3), (5, 7)), ((3, 5), (7, 10))]


def test_an_encoder_has_them_by_its_name(parse: Parse) -> None:
    config = parse(f"--vision-pp 2 --vision-vpp 3 {SCHEDULE}")
    assert plan_of(config, 3).units["vision"].num_virtual_stages == 6
    assert plan_of(config, 3).units["llm"].num_virtual_stages == 1


def test_zb_v_folds_them(parse: Parse) -> None:
    config = parse("--llm-pp 2 --llm-vpp 2 --schedule zb-v")
    stages = plan_of(config, 3).units["llm"].replicas[0].stages
    assert [stage.layer_ranges for stage in stages] == [((0, 3), (7, 10)), ((3, 5), (5, 7))]


def test_the_command_line_wins_over_the_other_way_in_the_file(parse: Parse, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("llm-num-layers-per-virtual-pipeline-stage: 1\nvision-dp: 1\nllm-pp: 2\n")
    config = parse(f"--config {tmp_path / 'config.yaml'} --llm-vpp 2 {SCHEDULE}")
    assert plan_of(config, 3).units["llm"].num_virtual_stages == 4


def test_units_dealt_to_one_grid_can_be_interleaved_without_virtual_stages_of_their_own(parse: Parse) -> None:
    line = f"--colocate-units --vision-pp 2 --llm-pp 2 {SCHEDULE}"
    assert parse(line, world_size=2).training.schedule == "interleaved-1f1b"
    with pytest.raises(ConfigError, match="--schedule interleaved-1f1b needs virtual stages"):
        parse(line.replace("--vision-pp 2", "--vision-pp 1"), world_size=2)


@pytest.mark.parametrize("planner", ["encoders-colocated", "entrain", "megatron-balanced", "optimus", "braid"])
@pytest.mark.parametrize("units", [LLM, UNITS, MORE_UNITS], ids=["LLM", "one encoder", "two encoders"])
def test_what_a_planner_prescribes_is_not_refused(tmp_path: Path, planner: str, units: dict[str, Any]) -> None:
    graph = ModelGraph.from_dict({"units": units})
    cluster = Cluster.from_file(CLUSTER)
    lengths = uniform_lengths(graph, tokens=dict.fromkeys(units, 64), num_samples=1)
    request = PlanningRequest(
        graph, cluster, 6, 12, lengths, micro_batch_size=1, transformer_impl="local", time_budget_seconds=0.5
    )
    run = PLANNERS[planner](request)
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    run.plan.to_file(tmp_path / "plan.yaml")
    flags = ["--model", str(tmp_path / "model.yaml"), "--plan", str(tmp_path / "plan.yaml"), *run.training_flags(CLUSTER).split()]
    config = parse_arguments([*BASE.split(), *flags], environ={"WORLD_SIZE": str(run.plan.num_ranks)})
    assert config.training.schedule == run.schedule


@pytest.mark.parametrize("schedule", sorted(BUILDERS))
def test_only_schedules_for_virtual_stages_take_them(parse: Parse, schedule: str) -> None:
    line = f"--llm-pp 2 --llm-vpp 2 --schedule {schedule}"
    if BUILDERS[schedule].virtual_stages is not VirtualStages.NO_USE:
        assert parse(line).training.schedule == schedule
        return
    with pytest.raises(ConfigError) as problem:
        parse(line)
    assert f"--llm-virtual-pipeline-model-parallel-size 2: --schedule {schedule} has no use for virtual stages" in str(
        problem.value
    )
    assert "choose --schedule breadth-first or interleaved-1f1b or interleaved-zb or zb-h1 or zb-v" in str(problem.value)


def test_a_plan_file_may_cut_layers_as_it_likes_but_gives_a_schedule_what_it_needs(parse: Parse, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    plan_of(parse(f"--llm-pp 2 --llm-vpp 2 {SCHEDULE}"), 3).to_file(path)
    for schedule in ("1f1b", "interleaved-1f1b"):
        assert parse(f"--plan {path} --schedule {schedule}").training.schedule == schedule
    with pytest.raises(
        ConfigError, match=r"in the shape of a V.*give a unit such 'layers' in .*plan\.yaml, or choose --schedule zb"
    ):
        parse(f"--plan {path} --schedule zb-v")


WRONG = [
    ("--llm-pp 2 --schedule interleaved-1f1b", "add --llm-virtual-pipeline-model-parallel-size 2 beside"),
    ("--llm-pp 2 --schedule zb-v", "in the shape of a V, the first stage the first and the last; found the layers"),
    ("--llm-pp 2 --schedule zb-v", "add --llm-virtual-pipeline-model-parallel-size 2 beside --llm-pipeline"),
    ("--llm-pp 2 --llm-vpp 4 --schedule zb-v", "folds 2 virtual stages per pipeline rank into a V; use 2, or"),
    ("--llm-pp 2 --llm-vpp 2 --num-layers-per-virtual-pipeline-stage 2", "both say how many virtual stages"),
    ("--llm-pp 2 --llm-vpp 2 --virtual-pipeline-model-parallel-size 3", "set the same thing to different values"),
    ("--plan p.yaml --llm-vpp 2", "--llm-virtual-pipeline-model-parallel-size and --plan exclude each other"),
    ("--llm-pp 2 --schedule encoders-colocated", "it runs several encoders as one, and the model has 1; leave it out"),
    ("--colocate-units --schedule eager-1f1b", "every rank holds the whole model, so no backward is late; leave it out"),
    ("--llm-pp 2 --schedule-passes fill,fill", "--schedule-passes names fill twice; leave one out"),
    (
        "--llm-pp 2 --schedule-passes delay-forward,defer-receives",
        "put delay-forward after defer-receives, such as --schedule-passes defer-receives,delay-forward",
    ),
    ("--llm-pp 2 --schedule-passes gather-parameters", "gather-parameters would be ignored: no two ranks hold"),
    ("--llm-pp 2 --schedule-passes reduce-by-layer", "reduce-by-layer would be ignored: no two ranks hold the same"),
    ("--colocate-units --schedule-passes fill", "--schedule-passes fill would be ignored: every rank holds the whole model"),
    ("--colocate-units --schedule-passes defer-receives", "defer-receives would be ignored: every rank holds the whole model"),
    (
        "--colocate-units --schedule-passes delay-forward",
        "delay-forward would be ignored: it leaves ranks as they are that 'llm'",
    ),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_what_would_mean_nothing_is_refused(parse: Parse, line: str, message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as problem:
        parse(line)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--schedule dip", "--schedule dip would be ignored: it arranges encoders, and the model has none; leave it out"),
        ("--schedule encoders-colocated", "it runs several encoders as one, and the model has none"),
        (
            "--schedule-passes split-backward",
            "split-backward would be ignored: it cuts backwards of encoders, and the model has none",
        ),
    ],
)
def test_what_is_for_encoders_needs_some(parse: Parse, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse(f"{line} --llm-pp 2", world_size=2, units=LLM)
    assert message in str(problem.value)


@pytest.mark.parametrize(
    ("line", "world_size", "units"),
    [
        ("--audio-dp 1 --llm-pp 2 --schedule encoders-colocated", 4, MORE_UNITS),
        ("--colocate-units --llm-pp 2 --schedule eager-1f1b --schedule-passes fill,defer-receives", 2, UNITS),
        ("--schedule eager-1f1b --schedule-passes delay-forward,split-backward", 2, UNITS),
        ("--vision-dp 2 --schedule-passes gather-parameters,reduce-by-layer", 3, UNITS),
        ("--colocate-units --schedule gpipe", 2, UNITS),
        ("--llm-pp 2 --schedule dip-4", 2, LLM),
        ("--schedule zb-h1", 1, LLM),
    ],
)
def test_the_same_where_it_means_something(parse: Parse, line: str, world_size: int, units: dict[str, Any]) -> None:
    training = parse(line, world_size=world_size, units=units).training
    assert f"{training.schedule} {training.schedule_passes}".split()[-1] in line


def test_an_old_transformer_engine_cannot_split_backwards(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("megatron.runtime.flags.device_rules._has_cuda", lambda: True)
    for line in ("--schedule zb-h1", "--schedule-passes fill"):
        with pytest.raises(ConfigError, match="splits backwards.*from version 2.3 on; install that, or use --transformer-impl"):
            parse(f"--llm-pp 2 --transformer-impl transformer_engine {line}")
