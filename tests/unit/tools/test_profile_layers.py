"""The profiler on this machine: real layers of the smallest model, and the file that the simulator takes."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from megatron.runtime import platform
from megatron.runtime.orchestrator.profile_layers import fake_ranks, groups_of_one
from megatron.runtime.profiler import build_layer, time_layer, time_runtime, time_update
from multimodal.cost.seconds.layer_curves import PackedSize
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph
from tools.profile_layers import main

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
IMAGE = {"patch_size": 2, "in_channels": 1}
UNITS = {"vision": {"role": "encoder", **SHAPE, "image": IMAGE}, "audio": {"role": "encoder", **SHAPE, "audio": {}}}
UNITS |= {"llm": {"role": "backbone", **SHAPE, "vocab_size": 32}, "painter": {"role": "generator", **SHAPE, "image": IMAGE}}
MODEL = {"units": UNITS}


@pytest.fixture(scope="module", autouse=True)
def cpu_platform() -> None:
    platform.install()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    return str(tmp_path / "model.yaml")


def test_every_layer_is_timed_and_written(model: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("tools.profile_layers.SECONDS_PER_SIZE", 0.0)
    output = tmp_path / "costs.yaml"
    flags = ["--model", model, "--output", str(output), "--sizes", "8,16,32", "--tp", "1,2", "--repetitions", "1", "--json"]
    flags += ["--sequences", "1,2,4"]
    assert main(flags) == 0, capsys.readouterr().err
    assert not dist.is_initialized()
    profile = LayerProfile.from_file(output)
    kinds = {(unit, kind) for unit, kind, *_ in profile.curves}
    assert ("audio", "transformer") in kinds and ("audio", "audio_embedding") not in kinds
    assert len(kinds) == 3 + 2 + 3 + 3
    assert {sizes for *_, tensor, context in profile.curves for sizes in [(tensor, context)]} == {(1, 1), (2, 1)}
    for (_, kind, *_), curves in profile.curves.items():
        has_input_gradient = kind not in ("patch_embedding", "token_embedding")
        assert (curves.input_gradient.at(16, 256) > 0) == has_input_gradient
        assert (curves.attention.at(16, 256) > 0) == (kind == "transformer")
        assert curves.forward.at(16, 256) > 0 and curves.weight_gradient.at(16, 256) > 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["layers"]) == len(profile.curves)
    assert set(report["layers"][0]["held_out_error"]) == {"forward", "input_gradient", "weight_gradient", "attention"}
    assert profile.step is not None and report["step"] == asdict(profile.step)
    assert profile.step.computation_seconds > 0
    assert profile.step.unit_update_seconds + profile.step.weight_update_seconds > 0


def test_packed_sequences_and_updates_are_timed_for_real(monkeypatch) -> None:
    graph = ModelGraph.from_dict(MODEL)
    taken: list[PackedSize] = []
    forward = UnitStage.forward

    def recorded(self, hidden, batch, item_embeddings=None):
        taken.append(PackedSize(batch.num_tokens, len(batch.lengths)))
        return forward(self, hidden, batch, item_embeddings)

    monkeypatch.setattr(UnitStage, "forward", recorded)
    sizes = (PackedSize(16), PackedSize(16, 4))
    with fake_ranks(1):
        groups = groups_of_one()
        build = partial(build_layer, graph, "llm", "transformer", groups=groups, options=BuildOptions(), vocab_size=32)
        times = time_layer(build(), sizes=sizes, num_repetitions=2)
        stage = build()
        before = [parameter.detach().clone() for parameter in stage.parameters()]
        size, seconds = time_update(stage, groups=groups, num_repetitions=2)
    assert set(times) == set(sizes) and taken == [*sizes] * 3
    assert all(min(one) > 0 for one in times.values())
    assert size.num_tokens == sum(parameter.numel() for parameter in before) and seconds > 0


def test_layers_without_weights_are_updated_in_no_time() -> None:
    """The layer that takes what other encoders give."""
    vision = {**MODEL["units"]["vision"], "has_projector": False, "image": {"patch_size": 2, "in_channels": 1, "merge_size": 1}}
    joint = {"role": "encoder", **SHAPE, "join": "sequence"}
    units = {"vision": vision, "joint": joint, "llm": MODEL["units"]["llm"]}
    graph = ModelGraph.from_dict({"units": units, "edges": [["vision", "joint"], ["joint", "llm"]]})
    with fake_ranks(1):
        groups = groups_of_one()
        stage = build_layer(graph, "joint", "joined_tokens", groups=groups, options=BuildOptions(), vocab_size=32)
        assert not list(stage.parameters())
        assert time_update(stage, groups=groups, num_repetitions=1) == (PackedSize(0), 0.0)


def test_the_runtime_is_timed_with_every_kind_of_unit() -> None:
    with fake_ranks(1):
        seconds, computation_seconds = time_runtime(ModelGraph.from_dict(MODEL), num_repetitions=2)
    assert seconds >= 0 and computation_seconds > 0


def test_points_pass_through_what_was_measured(model: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("tools.profile_layers.SECONDS_PER_SIZE", 0.0)
    output = tmp_path / "costs.json"
    flags = ["--model", model, "--unit", "llm", "--output", str(output), "--sizes", "8,16,32", "--repetitions", "1"]
    picture = tmp_path / "curves.png"
    assert main([*flags, "--fit", "interpolate", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mean (worst) error at held-out sizes" in capsys.readouterr().out
    curve = LayerProfile.from_file(output).curves["llm", "transformer", 1, 1].forward
    points = json.loads(output.read_text())["units"]["llm"]["transformer"][0]["forward"]
    assert points["tokens"] == [8, 16, 32]
    assert [curve.at(size, size**2) for size in points["tokens"]] == pytest.approx(points["seconds"])
