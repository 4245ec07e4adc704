"""Every plan that tools/plan.py writes runs: its printed flags pass the real parser, and the simulator predicts it alike."""

import json
import random
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import yaml

from benchmarks.baselines import COMPARED, WITHOUT_FED_ENCODERS
from megatron.runtime.flags import flag_rules
from megatron.runtime.flags.arguments import parse_arguments
from multimodal.data.length_table import write_length_table
from multimodal.plan.planners import TEMPLATE_PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import judge_run
from multimodal.plan.planners.search.run_variants import neighbours
from multimodal.schedule.builders import fed_encoders
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import Experts, ModelGraph
from tests.sanity.repository import ROOT
from tests.unit.plan.planners.planning_cases import AUDIO, GRAPHS, LLM, VISION, few_planners, random_lengths
from tools.plan import main as plan_main
from tools.plan import plan as plan_alone
from tools.simulate import main as simulate_main

SPEECH = replace(AUDIO, name="speech")
EXPERTS = replace(LLM, transformer=replace(LLM.transformer, experts=Experts(4, ffn_hidden_size=1024)))
MODELS = {
    **GRAPHS,
    "three-encoders": ModelGraph((VISION, AUDIO, SPEECH, LLM), tuple((unit.name, "llm") for unit in (VISION, AUDIO, SPEECH))),
    "experts": ModelGraph((VISION, EXPERTS), (("vision", "llm"),)),
}
CLUSTERS = ("a40", "h100", "cpu")
SHARES = "--data-parallel-sharding-strategy optim_grads_params"
COPIES = "--num-distributed-optimizer-instances 2"
OPTIONS = ("", "", "--transformer-impl local", SHARES)
SIZES = ("", "", "--fix llm:tp=1", "--fix llm:pp=2")
NUM_DRAWN = 56
SOME = 14
"""Every planner once."""


class Asked(NamedTuple):
    planner: str
    model: str
    cluster: str = "a40"
    num_gpus: int = 8
    batch: int = 24
    idle: frozenset[str] = frozenset()
    """Units of which no sample has an item."""
    frozen: str = ""
    more: str = ""
    neighbour: int | None = None
    """Seed of the neighbour of the plan that is written in its place; None: the plan itself."""


def draw(seed: int) -> Asked:
    choose = random.Random(seed)
    planner = list(COMPARED)[seed % len(COMPARED)]
    takes_fed = planner not in WITHOUT_FED_ENCODERS
    model = choose.choice([name for name, graph in MODELS.items() if takes_fed or not fed_encoders(graph)])
    others = [name for name in MODELS[model].unit_names if name not in ("llm", *fed_encoders(MODELS[model]))]
    idle = frozenset(name for name in others if choose.random() < 0.4)
    options = f"{choose.choice(OPTIONS)} {choose.choice(SIZES) if planner != 'fsdp' else ''}"
    sizes = choose.choice(CLUSTERS), choose.randint(4, 16), choose.choice((8, 12))
    return Asked(planner, model, *sizes, idle, choose.choice(("", *others)), options, choose.choice((None, seed)))


KNOWN = (
    Asked(
        "megatron-balanced", "two-encoders", "a40", 7, 4, frozenset({"audio"}), "audio", "--transformer-impl local --fix llm:tp=1"
    ),
    Asked("megatron-balanced", "three", num_gpus=6, idle=frozenset({"generator"}), more="--fix llm:tp=1"),
    Asked("fsdp", "two", num_gpus=1),
    Asked("megatron", "text-only", num_gpus=1, more=SHARES),
    Asked("braid", "experts", more=COPIES),
    Asked("disttrain", "two", more=f"{COPIES} {SHARES}"),
)


@pytest.fixture
def fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flags ask for CUDA and Transformer Engine, neither of which reading them needs."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(flag_rules, "_has_cuda", lambda: True)
    monkeypatch.setattr(flag_rules, "can_delay_weight_gradients", lambda: True)


ASKED = (*KNOWN, *map(draw, range(NUM_DRAWN)))


@pytest.mark.deep(when=lambda asked: asked not in ASKED[: len(KNOWN) + SOME])
@pytest.mark.parametrize("asked", ASKED, ids=[f"{number}-{asked.planner}" for number, asked in enumerate(ASKED)])
def test_what_is_printed_runs(asked: Asked, tmp_path: Path, fused_layers: None, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    more = [*asked.more.split(), *(("--freeze", asked.frozen) if asked.frozen else ())]
    flags = [*write_inputs(tmp_path, asked), *more, "--simulate-all", "--output", plan]
    with few_planners(asked.planner), patch("tools.plan.plan", partial(plan_nearby, asked.neighbour)):
        answer = run(plan_main, capsys, *flags)
    is_run = "pretrain_mllm.py" in plan.read_text()
    if not asked.frozen and is_run:
        again = run(simulate_main, capsys, *printed(plan, "tools/simulate.py"))
        assert again["iteration_seconds"] == pytest.approx(answer["iteration_seconds"])
        assert again["peak_memory_bytes"] == answer["peak_memory_bytes"]
    if is_run:
        config = parse(tmp_path, asked, num_gpus=answer["num_gpus_used"])
        assert (config.training.schedule, config.training.balance) == (answer["schedule"], answer["balance"])
        assert config.training.encoder_micro_batch_sizes == answer["encoder_micro_batch_sizes"]
        assert config.parallelism.num_distributed_optimizer_instances == 1 + (COPIES in asked.more)


def plan_nearby(neighbour: int | None, name: str, request: PlanningRequest, flags: Namespace) -> PredictedRun:
    planned = plan_alone(name, request, flags)
    others = [*neighbours(planned.run, request)] if neighbour is not None else []
    random.Random(neighbour).shuffle(others)
    for run in others:
        with suppress(BraidError):
            prediction = judge_run(run, request)
            if prediction.peak_memory_bytes <= request.memory_bytes:
                return PredictedRun(run, prediction)
    return planned


@pytest.mark.parametrize("planner", TEMPLATE_PLANNERS)
def test_what_templates_print_runs(planner: str, tmp_path: Path, fused_layers: None, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(planner, "two", num_gpus=24)
    run(plan_main, capsys, *write_inputs(tmp_path, asked), "--output-plan", tmp_path / "plan.yaml")
    document = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    ranks = {
        rank for unit in document["units"].values() for each in unit["replicas"] for of in each["stages"] for rank in of["ranks"]
    }
    assert parse(tmp_path, asked, num_gpus=len(ranks)).training.schedule == "1f1b"
    run(simulate_main, capsys, *printed(tmp_path / "plan.yaml", "tools/simulate.py"))


def write_inputs(folder: Path, asked: Asked) -> list[object]:
    graph = MODELS[asked.model]
    (folder / "model.yaml").write_text(yaml.safe_dump(graph.to_dict(), sort_keys=False))
    lengths = random_lengths(graph)
    write_length_table(
        folder / "lengths.csv",
        (replace(each, items=tuple(item for item in each.items if item.unit not in asked.idle)) for each in lengths),
    )
    inputs = ("--model", folder / "model.yaml", "--lengths", folder / "lengths.csv", "--vocab-size", 4096, "--time-budget", 0.5)
    cluster = ROOT / "examples" / "clusters" / f"{asked.cluster}.yaml"
    size = ("--cluster", cluster, "--num-gpus", asked.num_gpus, "--global-batch-size", asked.batch)
    return [*inputs, *size, "--planner", asked.planner]


def run(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *flags: object) -> dict[str, Any]:
    code = main([*map(str, flags), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    answer: dict[str, Any] = json.loads(captured.out)
    return answer


def printed(plan: Path, program: str) -> list[str]:
    """Return the flags of a command in a plan file, with the file's place."""
    line = next(line for line in plan.read_text().splitlines() if f"{program} --plan" in line)
    return ["--plan", str(plan), *line.split(f"--plan {plan.name} ")[1].split()]


def parse(folder: Path, asked: Asked, *, num_gpus: int) -> Any:
    """Read the printed command of a training, with what else it needs."""
    base = f"--model {folder}/model.yaml --data-path digits --lr 1e-3 --train-iters 1 --bf16 --global-batch-size {asked.batch}"
    line = f"{base} --freeze {asked.frozen}" if asked.frozen else base
    return parse_arguments(
        [*line.split(), *printed(folder / "plan.yaml", "pretrain_mllm.py")], environ={"WORLD_SIZE": str(num_gpus)}
    )
