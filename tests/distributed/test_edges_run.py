"""A run of a model whose encoders feed an encoder, which feeds the LLM and a generator: it trains as one process does, and tools
that read its files say of it what it says itself."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.arguments import choose_trained, parse_arguments
from megatron.runtime.orchestrator.orchestrate import Inputs, first_lengths
from megatron.runtime.training.prediction import build_predictor
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.placement import as_computed
from multimodal.cost.layers.registry import read_model
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from tests.distributed.launch import as_arguments
from tests.distributed.small_run import LEFT_OUT, MODEL, SIZED_OTHERWISE, train, working_flags
from tests.sanity.repository import ROOT
from tools import balance, lengths, simulate

IMAGE = {"patch_size": 8, "merge_size": 2, "in_channels": 3, "min_pixels": 256, "max_pixels": 4096}
EYE = {**MODEL["units"]["vision"], "has_projector": False}
UNITS = {
    "wide": {**EYE, "num_layers": 2},
    "narrow": EYE,
    "joint": {**EYE, "hidden_size": 128, "has_projector": True, "join": "features"},
    "llm": MODEL["units"]["llm"],
    "painter": {**MODEL["units"]["llm"], "role": "generator", "image": {**IMAGE, "merge_size": 1}},
}
del UNITS["joint"]["image"]
EDGES = [["wide", "joint"], ["narrow", "joint"], ["joint", "llm"], ["llm", "painter"], ["joint", "painter"]]
BATCH, NUM_STEPS = 6, 2
CLUSTER = ROOT / "examples" / "clusters" / "cpu.yaml"
VOCABULARY = -(-ByteTokenizer().vocab_size // 128) * 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and twelve samples: an image and text each, and in every other an image to be made after that."""
    made = tmp_path_factory.mktemp("edges")
    (made / "model.yaml").write_text(yaml.safe_dump({"units": UNITS, "edges": EDGES}, sort_keys=False))
    (made / "data").mkdir()
    lines = []
    for index in range(NUM_STEPS * BATCH):
        width = 32 + 16 * (index % 3)
        for name in ("seen", "made"):
            Image.effect_noise((width, 32), 50).convert("RGB").save(made / "data" / f"{name}{index}.png")
        image = {"type": "image", "width": width, "height": 32}
        segments: list[dict[str, Any]] = [
            {**image, "path": f"seen{index}.png"},
            {"type": "text", "role": "assistant", "text": "word " * (1 + index % 5)},
            {**image, "path": f"made{index}.png", "role": "assistant"},
        ]
        lines.append(json.dumps({"id": str(index), "segments": segments[: 2 + index % 2]}))
    (made / "data" / "manifest.jsonl").write_text("\n".join(lines))
    return made


RUN = {**SIZED_OTHERWISE, "--train-iters": NUM_STEPS, "--global-batch-size": BATCH}


def flags_of(folder: Path, more: Mapping[str, object]) -> list[str]:
    given = {**working_flags(folder), "--dtype": "float64", **RUN, **more}
    return [str(word) for word in as_arguments({name: value for name, value in given.items() if value is not LEFT_OUT})]


ALONE: dict[str, object] = {"--colocate-units": None}
OTHERWISE = {**ALONE, "--llm-tp": 2, "--sequence-parallel": None, "--balance": "orchmllm", "--cluster": CLUSTER}


def test_it_trains_as_one_process_does_and_the_tools_agree_with_it(folder, capsys, monkeypatch):
    alone, _ = train(folder, RUN | ALONE, num_ranks=1)
    log, _ = train(folder, {**RUN, **OTHERWISE, "--schedule": "nested"})
    for name in ("loss", "generator_loss", "grad_norm"):
        assert [entry[name] for entry in log] == pytest.approx([entry[name] for entry in alone], rel=1e-9)

    table = folder / "lengths.csv"
    assert lengths.main(["--output", str(table), *flags_of(folder, {})]) == 0
    data = ["--lengths", str(table), "--global-batch-size", str(BATCH), "--balance", "orchmllm", "--vocab-size", str(VOCABULARY)]
    model = ["--model", str(folder / "model.yaml")]
    replicas = ",".join(f"{name}={1 if name == 'llm' else 2}" for name in UNITS)
    capsys.readouterr()
    spread = ["--keep-order", "--replicas", replicas, "--microbatches", str(BATCH), "--num-batches", str(NUM_STEPS)]
    assert balance.main([*model, *data, *spread, "--json"]) == 0
    for unit, told in json.loads(capsys.readouterr().out)["units"].items():
        logged = [entry["imbalance"][unit] for entry in log]
        for what in ("replica", "microbatch"):
            for suffix, when in (("", "after_balancing"), ("_before", "before_balancing")):
                mean = statistics.fmean(each[when][f"busiest_{what}_over_mean"] for each in logged)
                assert told[f"{what}_imbalance{suffix}"] == pytest.approx(mean, rel=1e-9), (unit, what, when)

    for schedule in ("optimus", "nested"):
        predicted = predict(folder, monkeypatch, schedule=schedule)
        how = ["--cluster", str(CLUSTER), "--zero-stage", "0", "--transformer-impl", "local", "--schedule", schedule, "--json"]
        assert simulate.main([*model, "--plan", str(folder / "plan.yaml"), *data, *how]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["iteration_seconds"] - told["update_seconds"] == pytest.approx(predicted, rel=1e-9)


def predict(folder: Path, monkeypatch: pytest.MonkeyPatch, *, schedule: str) -> float:
    """Return the seconds that the run predicts of its first step, and write its plan."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse_arguments(flags_of(folder, {**OTHERWISE, "--schedule": schedule}), environ={"WORLD_SIZE": "2"})
    graph = choose_trained(read_model(config.model.model), config.model)
    plan = plan_colocated(graph, sizes={**dict.fromkeys(UNITS, UnitSizes()), "llm": UnitSizes(2)}, world_size=2)
    plan.to_file(folder / "plan.yaml")
    inputs = Inputs(graph, build_data_sets(config, graph), VOCABULARY)
    batch = list(first_lengths(config, inputs.data, most=BATCH))
    schedules = ScheduleCache(graph, plan, BUILDERS[schedule])
    predictor = build_predictor(config, schedules, vocab_size=VOCABULARY)
    options = BalanceOptions(vocab_size=VOCABULARY, ranks_per_node=2)
    assignment = BALANCERS["orchmllm"](batch, graph=graph, plan=plan, options=options)
    return predictor.predict(as_computed(assignment, batch, graph=schedules.graph, plan=schedules.plan), batch).seconds
