"""Encoders of transformers as they are (DINOv2, HuBERT, a Whisper's): the gradients of plain torch and of one process, errors."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import multimodal
from megatron.runtime.hugging_face.unit_weights import load_units
from multimodal.cost.layers.registry import read_model
from multimodal.model.layers.opaque import find_unused
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.errors import ModelError, PlanError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.validate import validate_plan
from tests.distributed import hugging_face_comparison as comparison
from tests.distributed.dealt_case import dealt
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step, single_rank_plan
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import run_and_save
from tests.distributed.hugging_face_models import TOWERS, llama
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.training_case import build_plan
from tests.distributed.wide_transformers import double_precision

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")


SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24, "init_method_std": 0.3}
IMAGE = {"image_size": 8, "patch_size": 2, "in_channels": 3, "merge_size": 2}
ONE, TWO = (("vision", 2, 2),), (("vision", 2, 2), ("vision", 2, 2))
SAMPLES = (SampleShape(ONE, 5, 3), SampleShape(TWO, 4, 2), SampleShape((), 3, 2), SampleShape(ONE, 6, 2), SampleShape((), 6, 2))
GROUPS = ([0, 1], [2, 3], [4])


def dinov2() -> Any:
    return TOWERS["dinov2"]().config


@pytest.fixture
def graph(tmp_path: Path) -> ModelGraph:
    dinov2().save_pretrained(tmp_path / "dinov2")
    return describe(tmp_path)


def describe(folder: Path, **vision: Any) -> ModelGraph:
    """Through a model file, beside which the folder of the encoder is."""
    import yaml

    encoder = {"role": "encoder", **SHAPE, "image": IMAGE, "module": {"directory": "dinov2"}, **vision}
    units = {"vision": encoder, "llm": {"role": "backbone", **SHAPE}}
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    return read_model(folder / "model.yaml")


def case_of(graph: ModelGraph, **changes: Any) -> GradientCase:
    sizes = {"vision": (1, 1, 2), "llm": (2, 1, 1), **changes.pop("sizes", {})}
    plan = build_plan(graph, colocated=changes.pop("colocated", False), **sizes)
    source = RandomSource(graph, SAMPLES, changes.pop("vocab_size", 12))
    return GradientCase(graph, plan, dealt(source, plan, GROUPS), source, **changes)


def test_gradients_equal_one_process_under_plans(graph, ranks):
    frozen = replace(graph, units=(replace(graph.units[0], freeze_module=True), graph.units[1]))
    for case in (
        case_of(graph, sequence_parallel=True),
        case_of(graph, shards_weights=True, sizes={"llm": (1, 1, 2)}, colocated=True),
        case_of(graph, builder="zb-h1", recompute="full", sizes={"vision": (1, 1, 1), "llm": (1, 2, 1)}),
        case_of(frozen),
    ):
        assert_matches(case, ranks)


def plain_gradients(case: GradientCase) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    """Of the encoder's stage and of plain torch, by parameter; on one rank."""
    from transformers import AutoModel

    session = build_session(replace(case, plan=single_rank_plan(case.graph)))
    stage: UnitStage = session.stages["vision", 0].train()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    windows = pixels.view(2, 3, 2, 2, 2, 2, 2, 2).permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )  # image, window row and column, row, column, ...
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    places = torch.stack((rows, columns), -1).view(2, 2, 2, 2, 2).transpose(1, 2).reshape(16, 2)
    output = stage(None, PackedInput((16, 16), places.repeat(2, 1), patches=windows.reshape(32, 12)))
    output.square().sum().backward()
    plain = AutoModel.from_config(dinov2()).double().eval()
    weights = {name: value.detach().clone().requires_grad_() for name, value in stage.named_parameters()}
    hidden = torch.func.functional_call(
        plain, {name: weights[f"layers.0.module.{name}"] for name, _ in plain.named_parameters()}, (pixels,)
    ).last_hidden_state[:, 1:]
    hidden = F.rms_norm(hidden, (16,), weights["layers.1.norm.weight"], 1e-5)
    merged = hidden.view(2, 2, 2, 2, 2, 16).transpose(2, 3).reshape(8, 64)
    inner = F.gelu(F.linear(merged, weights["layers.1.mlp.linear_fc1.weight"], weights["layers.1.mlp.linear_fc1.bias"]))
    F.linear(inner, weights["layers.1.mlp.linear_fc2.weight"], weights["layers.1.mlp.linear_fc2.bias"]).square().sum().backward()
    return [
        (name, getattr(each, "main_grad", None) if each.requires_grad else None, weights[name].grad)
        for name, each in stage.named_parameters()
    ]


def test_gradients_equal_plain_torch(graph, ranks):
    (found,) = ranks.run(plain_gradients, case_of(graph), world_size=1)
    assert [name for name, mine, _ in found if mine is None] == ["layers.0.module.embeddings.mask_token"]
    for name, mine, theirs in found:
        if mine is not None:
            assert theirs is not None and (mine - theirs).abs().max() <= 1e-9 * max(1e-3, float(theirs.abs().max())), name


def test_what_cannot_be_is_said(graph, tmp_path):
    with pytest.raises(PlanError, match=r"unit 'vision': tp 2 x cp 1 would cut a module of transformers, which is one piece"):
        validate_plan(build_plan(graph, vision=(2, 1, 1), llm=(1, 1, 1)), graph=graph, world_size=3)
    with pytest.raises(
        PlanError, match=r"unit 'vision': a module of transformers is one piece, which cannot be cut into 2 pipeline"
    ):
        build_plan(graph, vision=(1, 2, 1), llm=(1, 1, 1))
    with pytest.raises(ModelError, match=r"line \d+: unit 'vision': module belongs to encoders of images of one size"):
        describe(tmp_path, image={"patch_size": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": {"directory": "nowhere"}}, "there is no config.json in nowhere"),
        ({"module": {"directory": "dinov2", "class": "Trainer"}}, "has no model 'Trainer'"),
        ({"module": {"directory": "dinov2", "part": "tower"}}, "cannot be built from"),
        ({"hidden_size": 32}, r"gives \[17, 16\] for an image, but the unit has 16 tokens of hidden_size 32"),
    ],
)
def test_a_wrong_module_is_said_when_it_is_built(graph, tmp_path, change, message):
    from multimodal.model.layers.opaque import build_module, find_unused

    unit = describe(tmp_path, **change).unit("vision")
    assert unit.module is not None and unit.image is not None
    with pytest.raises(ModelError, match=message):
        build_module(unit, unit.module)
        find_unused(unit, unit.module, unit.image)


def test_programs_of_a_folder_never_run(tmp_path, monkeypatch):
    """Not even if somebody answers yes to all questions on stdin."""
    from multimodal.model.layers.opaque import build_module

    ran, folder = tmp_path / "ran", tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass OwnConfig: pass\nclass Own: pass\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    unit = describe(tmp_path, module={"directory": "own"}).unit("vision")
    assert unit.module is not None
    with pytest.raises(ModelError, match="AutoModel cannot be built from .*config.json"):
        build_module(unit, unit.module)
    assert not ran.exists()


pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")


SEEN, STEP, MOST = 30, 20, 12
"""Samples that a token is made of, samples from one to the next, tokens of the Whisper's longest clip."""
CLIPS = {"hubert": (SEEN + 4 * STEP, SEEN + 9 * STEP + 7, SEEN + 5 * STEP + 19), "whisper": (9, 16, 2 * MOST)}
"""Samples, and frames."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    llama().save_pretrained(folder / "llm")
    TOWERS["hubert"]().save_pretrained(folder / "hubert")
    TOWERS["classifier of sound"]().save_pretrained(folder / "whisper")
    return folder


def composed(folders: Path, target: Path, encoder: str) -> ModelGraph:
    encoders, output = {"audio": folders / encoder}, target / "model.yaml"
    return multimodal.compose(llm=folders / "llm", encoders=encoders, merge_size=3, output=output)


def sound_case_of(graph: ModelGraph, encoder: str, sizes: dict[str, Any], **options: Any) -> GradientCase:
    first, second, third = ((("audio", length, 1),) for length in CLIPS[encoder])
    shapes = (SampleShape(first, 5, 3), SampleShape((*second, *first), 6, 2), SampleShape((), 4, 2), SampleShape(third, 7, 3))
    return comparison.case_of(graph, shapes, sizes, **options)


@pytest.mark.deep(when=lambda encoder: encoder == "hubert")  # what it hears is held against transformers below
@pytest.mark.parametrize("encoder", ["hubert", "whisper"])
def test_gradients_equal_one_process_and_files_are_as_they_were(folders, encoder, ranks, tmp_path):
    graph = composed(folders, tmp_path, encoder)
    alone = sound_case_of(graph, encoder, {"audio": (1, 1, 1), "llm": (1, 1, 1), "colocated": True})
    (expected,) = ranks.run(run_and_save, alone, world_size=1)
    for name, case in (
        ("replicas", sound_case_of(graph, encoder, {"audio": (1, 1, 2), "llm": (2, 1, 1)})),
        ("zero 3", sound_case_of(graph, encoder, {"audio": (1, 1, 2), "llm": (1, 1, 2), "colocated": True}, shards_weights=True)),
    ):
        assert_matches(case, ranks, run=partial(run_and_save, target=str(tmp_path / name)), expected=expected)
        theirs = (folders / encoder / "model.safetensors").read_bytes()
        assert (tmp_path / name / "audio" / "model.safetensors").read_bytes() == theirs


def heard_and_expected(case: GradientCase, folder: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a layer gives for each clip, and the module of transformers for what its feature extractor would; on one rank."""
    session, outputs = build_session(case), []
    load_units(session)
    (stage,) = [stage for (unit, _), stage in session.stages.items() if unit == "audio"]
    stage.layers["0"].register_forward_hook(lambda module, inputs, output: outputs.append(output[:, 0].detach().numpy()))
    run_step(session, plan_case(case))
    found = [row for output in outputs for row in output]
    module, source, pairs = module_of(folder), case.source, []
    for index, shape in enumerate(source.shapes):  # type: ignore[attr-defined]
        for item, (_, length, _) in enumerate(shape.items):
            with torch.no_grad(), double_precision():
                theirs = module(given_to(source, index, item, length)).last_hidden_state[0]
            num_tokens = (length - SEEN) // STEP + 1 if "hubert" in folder else (length - 1) // 2 + 1
            mine, found = np.stack(found[:num_tokens]), found[num_tokens:]
            pairs.append((mine, theirs[:num_tokens].numpy()))
    assert not found
    return pairs


def module_of(folder: str) -> Any:
    from transformers import HubertModel, WhisperForAudioClassification

    if "hubert" in folder:
        return HubertModel.from_pretrained(folder).double().eval()
    return WhisperForAudioClassification.from_pretrained(folder).encoder.double().eval()


def given_to(source: Any, index: int, item: int, length: int) -> torch.Tensor:
    """Samples with a mean of 0 and a variance of 1, up to the last whole token; or frames and silence up to the longest clip."""
    audio = source.graph.unit("audio").audio
    if audio.waveform is not None:
        samples = np.random.default_rng((0, index, item)).standard_normal(length).astype(np.float32)
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
        return torch.from_numpy(samples[: (SEEN + (length - SEEN) // STEP * STEP)]).double()[None]
    num_frames = 2 * ((length - 1) // 2 + 1) + 1
    frames = source.frames(index, item).copy()
    frames[num_frames:] = frames[:num_frames].max() - 2
    return torch.from_numpy(frames.T.copy()).double()[None]


@pytest.mark.parametrize("encoder", ["hubert", "whisper"])
def test_every_clip_is_heard_as_in_transformers(folders, encoder, ranks, tmp_path):
    case = sound_case_of(composed(folders, tmp_path, encoder), encoder, {"audio": (1, 1, 1), "llm": (1, 1, 1), "colocated": True})
    (pairs,) = ranks.run(heard_and_expected, case, str(folders / encoder), world_size=1)
    assert [len(mine) for mine, _ in pairs] == ([5, 10, 5, 6] if encoder == "hubert" else [5, 8, 5, 12])
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, atol=1e-9)


def test_what_does_not_fit_is_said(folders, tmp_path):
    graph = composed(folders, tmp_path, "hubert")
    unit = graph.unit("audio")
    assert unit.module is not None and unit.audio is not None

    def changed(waveform: dict[str, Any], *, left_out: str = "", **audio: Any) -> Unit:
        plain = graph.to_dict()
        entry = plain["units"]["audio"]
        entry["audio"] |= {"waveform": entry["audio"]["waveform"] | waveform, **audio}
        entry.pop(left_out, None)
        return ModelGraph.from_dict(plain).unit("audio")

    for message, wrong in (
        ("or of sound in one piece", lambda: changed({}, chunk_tokens=4)),
        ("widths has 3 numbers and steps 2, expected one of each", lambda: changed({"steps": [5, 2]})),
        ("a token sees 1 samples of 20", lambda: changed({"widths": [1, 1, 1]})),
        ("waveform is what modules of transformers take", lambda: changed({}, left_out="module")),
    ):
        with pytest.raises(ModelError, match=message):
            wrong()
    other = changed({"steps": [5, 2, 1]}).audio
    assert other is not None
    with pytest.raises(ModelError, match=r"gives \[\d+, 16\] for a clip, but the unit has 9 tokens of hidden_size 16"):
        find_unused(unit, unit.module, other)
    assert find_unused(unit, unit.module, unit.audio) == {"masked_spec_embed"}
