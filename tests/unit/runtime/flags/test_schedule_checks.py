"""Schedules, passes and virtual stages against each other and the plan: as flags, with their messages."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import build_plan, parse_arguments
from multimodal.cost.cluster import Cluster
from multimodal.data.length_table import uniform_lengths
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from tests.sanity.repository import ROOT
from tests.unit.runtime.flags.conftest import Parse
from tests.unit.runtime.flags.test_answers import LONG, MODELS

LLM, UNITS = MODELS["llm of 8 layers"], MODELS["vision, llm of 8 layers"]
BASE = "--data-path digits --lr 1e-3 --train-iters 10 --global-batch-size 8"
CLUSTER = ROOT / "examples" / "clusters" / "h100.yaml"


@pytest.mark.deep(when=lambda planner, units: planner == "braid" and units != LONG)
@pytest.mark.parametrize("planner", ["encoders-colocated", "entrain", "megatron-balanced", "optimus", "braid"])
@pytest.mark.parametrize("units", [LLM, UNITS, LONG], ids=["LLM", "one encoder", "two encoders"])
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


def test_a_plan_file_may_cut_layers_as_it_likes_but_gives_a_schedule_what_it_needs(parse_on_base: Parse, tmp_path: Path) -> None:
    parse, path = partial(parse_on_base, world_size=3, units=UNITS), tmp_path / "plan.yaml"
    config = parse("--llm-pp 2 --llm-vpp 2 --schedule interleaved-1f1b")
    build_plan(config, ModelGraph.from_file(config.model.model), 3).to_file(path)
    for schedule in ("1f1b", "interleaved-1f1b"):
        assert parse(f"--plan {path} --schedule {schedule}").training.schedule == schedule
    with pytest.raises(
        ConfigError, match=r"in the shape of a V.*give a unit such 'layers' in .*plan\.yaml, or choose --schedule zb"
    ):
        parse(f"--plan {path} --schedule zb-v")
