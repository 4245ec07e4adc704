"""An LLM and encoders from folders of their own: a model file, weights from each, and folders like each at the end."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file

import multimodal
from megatron.runtime.hugging_face.save_weights import save_adapter
from megatron.runtime.hugging_face.unit_weights import load_units
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.values.errors import CheckpointError, ModelError
from multimodal.values.model_graph import ModelGraph
from tests.distributed import hugging_face_comparison as comparison
from tests.distributed import test_opaque
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import MULTIPLE, VOCABULARY, run_and_save
from tests.distributed.hugging_face_models import MAX_TOKENS, TOWERS, llama, pixels_of
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankError
from tests.distributed.test_hugging_face_families import CLIPS
from tests.distributed.wide_transformers import double_precision, randomize_vectors

case_of = partial(test_opaque.case_of, vocab_size=MULTIPLE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a Llama, two DINOv2, a SigLIP, a CLIP of which only the part that sees is wanted, and a Whisper."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    llama().save_pretrained(folder / "llm")
    for name in ("dinov2", "registers", "siglip", "clip", "whisper"):
        tower = TOWERS[name]()
        if name in ("registers", "whisper"):
            randomize_vectors(tower)
        tower.save_pretrained(folder / name)
    (folder / "registers" / "preprocessor_config.json").write_text(json.dumps(SMALLER))
    return folder


SMALLER = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_center_crop": True, "size": {"shortest_edge": 10}}
SMALLER["crop_size"] = {"height": 8, "width": 8}
"""Than the images for which the DINOv2 with registers has positions."""


def composed(folders: Path, target: Path, encoder: str, **options: Any) -> ModelGraph:
    return multimodal.compose(
        llm=folders / "llm", encoders={"vision": folders / encoder}, merge_size=2, output=target / "model.yaml", **options
    )


@pytest.mark.deep(when=lambda encoder, as_modules: (encoder, as_modules) != ("clip", ["vision"]))  # families have the layers
@pytest.mark.parametrize(
    ("encoder", "as_modules"), [("dinov2", ["vision"]), ("clip", ["vision"]), ("clip", []), ("siglip", []), ("registers", [])]
)
def test_weights_come_from_their_folders_and_go_into_folders_like_them(folders, encoder, as_modules, ranks, tmp_path):
    graph = composed(folders, tmp_path, encoder, freeze=["vision"], as_modules=as_modules)
    assert graph == read_model(tmp_path / "model.yaml")
    assert (graph.unit("vision").freeze_module, graph.backbone.vocab_size) == (True, VOCABULARY)
    alone = case_of(graph, sizes={"vision": (1, 1, 1), "llm": (1, 1, 1)}, colocated=True)
    (expected,) = ranks.run(run_and_save, alone, str(tmp_path / "alone"), world_size=1)
    cut = {} if as_modules else {"vision": (2, 2, 1)}
    for name, case in (
        ("tp 2", case_of(graph, sizes=cut)),
        ("zero 3", case_of(graph, shards_weights=True, sizes={"llm": (1, 1, 2)}, colocated=True)),
    ):
        assert_matches(case, ranks, run=partial(run_and_save, target=str(tmp_path / name)), expected=expected)
    for name in ("alone", "tp 2", "zero 3"):
        for part, source in (("llm", "llm"), ("vision", encoder)):
            theirs = (folders / source / "model.safetensors").read_bytes()
            assert (tmp_path / name / part / "model.safetensors").read_bytes() == theirs, f"{part} under {name}"
        projector = {key.split(".", 4)[4] for key in load_file(tmp_path / name / "projectors" / "model.safetensors")}
        assert projector == {f"linear_fc{index}.{kind}" for index in (1, 2) for kind in ("weight", "bias")}
    larger = replace(graph, units=(*graph.encoders, replace(graph.backbone, vocab_size=VOCABULARY + 1)))
    ranks.run(run_and_save, replace(alone, graph=larger), str(tmp_path / "larger"), world_size=1)
    assert json.loads((tmp_path / "larger" / "llm" / "config.json").read_text())["vocab_size"] == VOCABULARY + 1


def test_what_transformers_has_as_a_whole_is_written_as_that(folders, ranks, tmp_path):
    """A CLIP before a Llama is a LLaVA: their tensors, the LLM's other files, and the images of the CLIP."""
    (folders / "llm" / "tokenizer_config.json").write_text("{}")
    encoders, output = {"vision": folders / "clip"}, tmp_path / "model.yaml"
    graph = multimodal.compose(llm=folders / "llm", encoders=encoders, feature_layer=-2, output=output)
    shapes = tuple(SampleShape((("vision", 4, 4),) * count, 5, 3) for count in (1, 0, 2))
    case = comparison.case_of(graph, shapes, {"vision": (1, 1, 1), "llm": (2, 1, 1)})
    ranks.run(run_and_save, case, str(tmp_path / "llava"), world_size=case.plan.num_ranks)
    from transformers import LlavaForConditionalGeneration

    model, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava", output_loading_info=True)
    assert not any(info.values()), info
    assert (model.config.vision_config.num_hidden_layers, model.config.vision_feature_layer) == (1, -1)
    found = load_file(tmp_path / "llava" / "model.safetensors")
    theirs = {f"language_model.{key}": value for key, value in load_file(folders / "llm" / "model.safetensors").items()}
    for key, value in load_file(folders / "clip" / "model.safetensors").items():
        if key.startswith("vision_model.") and ".layers.1." not in key and "post_layernorm" not in key:
            theirs[f"vision_tower.{key.removeprefix('vision_model.')}"] = value
    rest = {key for key in found.keys() - theirs.keys() if "projector" not in key and "post_layernorm" not in key}
    assert not rest and all(torch.equal(found[key].float(), value) for key, value in theirs.items())
    assert {"tokenizer_config.json", "preprocessor_config.json"} <= {path.name for path in (tmp_path / "llava").iterdir()}


def test_a_tower_sees_what_transformers_see(folders, ranks, tmp_path):
    """Patches behind the norm, without class token and registers, of images smaller than its positions."""
    graph = multimodal.compose(llm=folders / "llm", encoders={"vision": folders / "registers"}, output=tmp_path / "model.yaml")
    sizes: dict[str, Any] = {"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}
    case = comparison.case_of(graph, (SampleShape((("vision", 4, 4),), 7, 3),), sizes)
    (found,) = ranks.run(heard, case, "vision", world_size=1)
    from transformers import Dinov2WithRegistersModel

    pixels = pixels_of(case.source.item(0, 0).patches, 1)
    with torch.no_grad(), double_precision():
        eye = Dinov2WithRegistersModel.from_pretrained(folders / "registers").double().eval()
        assert torch.allclose(torch.from_numpy(found), eye(pixels[None]).last_hidden_state[0, 3:], atol=1e-12)


def test_a_whisper_hears_what_transformers_hear(folders, ranks, tmp_path):
    """Two clips of the longest length, behind which nothing is, in one microbatch: the same rows, behind the norm."""
    graph = multimodal.compose(llm=folders / "llm", encoders={"audio": folders / "whisper"}, output=tmp_path / "model.yaml")
    sizes: dict[str, Any] = {"audio": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}
    case = comparison.case_of(graph, (SampleShape((("audio", 2 * MAX_TOKENS, 1),) * 2, 7, 3),), sizes)
    (found,) = ranks.run(heard, case, world_size=1)
    from transformers import WhisperForConditionalGeneration

    ear = WhisperForConditionalGeneration.from_pretrained(folders / "whisper").model.encoder.double().eval()
    frames = np.stack([case.source.frames(0, item) for item in range(2)])  # type: ignore[attr-defined]
    with torch.no_grad(), double_precision():
        expected = ear(torch.from_numpy(frames).double().transpose(1, 2)).last_hidden_state.flatten(0, 1)
    assert torch.allclose(torch.from_numpy(found), expected, rtol=0, atol=1e-12)


def save_apart(case: GradientCase, target: str) -> None:
    session = build_session(case)
    load_units(session)
    save_adapter(Path(target), session=session)


def test_adapters_and_projectors_are_written_apart(folders, ranks, tmp_path):
    encoders, output = {"audio": folders / "whisper"}, tmp_path / "model.yaml"
    graph = multimodal.compose(llm=folders / "llm", encoders=encoders, freeze=["audio"], output=output)
    graph = adapt_units(graph, linear_layers(graph), rank=2, alpha=4.0, targets=())
    case = comparison.case_of(graph, CLIPS, {"audio": (1, 1, 1), "llm": (2, 2, 1)})
    ranks.run(save_apart, case, str(tmp_path / "apart"), world_size=case.plan.num_ranks)
    adapters = load_file(tmp_path / "apart" / "llm" / "adapter_model.safetensors")
    modules = {key.split(".")[-3] for key in adapters}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(key.startswith("base_model.model.model.layers.") for key in adapters)
    config = json.loads((tmp_path / "apart" / "llm" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["modules_to_save"]) == (str(folders / "llm"), None)
    kept = {key.split(".", 3)[3] for key in load_file(tmp_path / "apart" / "projectors" / "model.safetensors")}
    products = {f"mlp.linear_fc{index}.{kind}" for index in (1, 2) for kind in ("weight", "bias")}
    assert kept == products | {"norm.weight", "norm.bias"}


def heard(case: GradientCase, unit_name: str = "audio") -> Any:
    """What the projector of a case's first microbatch multiplies."""
    session, rows = build_session(case), []
    load_units(session)
    (stage,) = [stage for (unit, _), stage in session.stages.items() if unit == unit_name]
    projector: Any = stage.layers[str(len(stage.unit.layers) - 1)]
    projector.mlp.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0][:, 0].detach().numpy()))
    run_step(session, plan_case(case))
    return rows[0]


def find_modules_in(folder: str) -> None:
    sys.path.append(folder)


def test_functions_run_between_modules(folders, ranks, tmp_path):
    (tmp_path / "between_modules.py").write_text("def doubled(values):\n    return 2 * values\n")
    ranks.run(find_modules_in, str(tmp_path), world_size=8)
    function = "between_modules:doubled"
    losses = []
    for places in ((), ("before_encoder",), ("after_encoder",), ("after_projector",)):
        graph = composed(folders, tmp_path, "dinov2", callbacks={"vision": dict.fromkeys(places, function)})
        case = case_of(graph, sizes={"vision": (1, 1, 1), "llm": (1, 1, 1)}, colocated=True)
        losses.append(ranks.run(run_and_save, case, world_size=1)[0].loss_sums["llm"])
    assert len(set(losses)) == len(losses), "each of them changes the result"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projector": "mpl"}, "projector 'mpl' is not known; use one of mlp, merger"),
        ({"freeze": ["sight"]}, "freeze names 'sight', which is none of vision, llm"),
        ({"callbacks": {"vision": {"before_llm": "a:b"}}}, "have 'before_llm', expected one of before_encoder"),
        ({"callbacks": {"vision": {"after_encoder": "os.system"}}}, "is no function; write package.module:function"),
        ({"encoders": {"vision": "nowhere"}}, "nowhere/config.json: there is no such file"),
        ({"encoders": {"vision": "llm"}}, "image_size is None, expected an integer; take an encoder of images of one size"),
        ({"llm": "clip"}, "architectures is"),
        ({"llm": ["llm"]}, r"llm is \['llm'\], expected the path of a folder"),
        ({"encoders": {"llm": "dinov2"}}, "'llm' names two units; give one another name"),
        ({"encoders": ["dinov2"]}, "expected a mapping from the name of each encoder to its folder"),
        ({"callbacks": {"vision": {"after_encoder": len}}}, "is no function; write package.module:function"),
        ({"callbacks": {"vision": len}}, "is <built-in function len>, expected a mapping from before_encoder"),
        ({"freeze": "vision"}, "freeze is 'vision', expected a list of names"),
        ({"merge_size": "2"}, "merge_size is '2', expected an integer"),
        ({"merge_size": {"sight": 2}}, "merge_size names 'sight', which is none of vision"),
        ({"output": "nowhere/model.yaml"}, "nowhere/model.yaml cannot be written .*; give a path in a folder that is there"),
    ],
)
def test_parts_that_do_not_fit_are_said(folders, tmp_path, changes, message):
    given = {"llm": "llm", "encoders": {"vision": "dinov2"}, **changes}
    if isinstance(given["llm"], str):
        given["llm"] = folders / given["llm"]
    if isinstance(given["encoders"], dict):
        given["encoders"] = {name: folders / folder for name, folder in given["encoders"].items()}
    given |= {"as_modules": ["vision"], "output": tmp_path / given.get("output", "model.yaml")}
    with pytest.raises(ModelError, match=message):
        multimodal.compose(**given)


def test_weights_of_another_model_are_an_error_on_every_rank(folders, ranks, tmp_path):
    for as_modules, message in (
        (["vision"], "clip.* is missing"),
        ([], "clip.*config.json is of another model: unit 'vision' would need .* found"),
    ):
        graph = composed(folders, tmp_path, "dinov2" if as_modules else "registers", as_modules=as_modules)
        other = replace(graph, units=(replace(graph.units[0], weights=str(folders / "clip")), graph.units[1]))
        with pytest.raises(RankError, match=rf"(?s){CheckpointError.__name__}.*{message}"):
            ranks.run(run_and_save, case_of(other), world_size=4)
