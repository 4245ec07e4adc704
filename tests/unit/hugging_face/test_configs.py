"""config.json and processors: the model graphs that they are read as, what is written of these, and what is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from multimodal.cost.layers.registry import read_model
from multimodal.hugging_face.composition import compose
from multimodal.hugging_face.llava import LLAVA, is_unused
from multimodal.hugging_face.processors import write_video_processor
from multimodal.hugging_face.registry import architecture_of, check_same_model, with_vocab_size
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.errors import ModelError, PlanError
from multimodal.values.model_graph import ModelGraph
from tests.sanity.repository import ROOT
from tests.unit.golden_answers import Kinds, changed, golden_test

PUBLISHED: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())
"""A small Llama, and what llava-1.5-7b-hf, pixtral-12b, InternVL3-1B, Qwen2-VL, Qwen2.5-VL-3B, Qwen3-VL-4B, Qwen2-Audio-7B and
Qwen2.5-Omni-7B say, without what computes nothing."""

Build = Callable[[dict[str, Any]], ModelGraph]


def write_folder(folder: Path, document: dict[str, Any]) -> Path:
    """Write a folder's files; what a document has beside its config are `processor` and `video_processor`."""
    config = dict(document)
    for name, key in (("preprocessor", "processor"), ("video_preprocessor", "video_processor")):
        (folder / f"{name}_config.json").unlink(missing_ok=True)
        if key in config:
            (folder / f"{name}_config.json").write_text(json.dumps(config.pop(key)))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_folder(document: dict[str, Any]) -> ModelGraph:
    return read_model(write_folder(Path(), document))


def flattened(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flattened(part, f"{place}.{key}")
    elif value not in (None, False, [], ()):
        yield place, rounded(value)


def rounded(value: Any) -> Any:
    """Return numbers as no machine's mathematical library makes them otherwise."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def compose_llava(document: dict[str, Any]) -> ModelGraph:
    """Compose a tower of a folder of its own with a Llama."""
    folders = {name: Path(name) for name in ("llm", "vision")}
    for name, folder in folders.items():
        folder.mkdir(exist_ok=True)
        write_folder(folder, document[name])
    return compose(
        llm=folders["llm"], encoders={"vision": folders["vision"]}, output=Path("model.yaml"), **document.get("options", {})
    )


def facts_of(document: dict[str, Any], build: Build) -> dict[str, Any]:
    """Return all that is read from folders, and what is written of it, by places; what is absent, none or false has none."""
    graph = build(document)
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    found = {}
    for unit in graph.units:
        found |= flattened(graph.to_dict()["units"][unit.name], unit.name)
        found[f"{unit.name}.layers"] = ", ".join(f"{len([*run])} {kind}" for kind, run in groupby(unit.layers))
    try:
        architecture = architecture_of(graph)
    except ModelError:
        return found
    assert architecture.to_config is not None
    config = architecture.to_config(graph)
    assert with_vocab_size(config, 7) != config
    again = ModelGraph.from_dict(architecture.to_graph({**document, **config}))
    processors = {"processor": architecture.to_processor(graph), "video_processor": write_video_processor(graph)}
    written = {place: value for name, part in {"written": config, **processors}.items() for place, value in flattened(part, name)}
    for unit in again.units:
        read = dict(flattened(again.to_dict()["units"][unit.name], unit.name))
        written |= {f"again.{place}": value for place, value in read.items() if found.get(place) != value}
    return {"family": architecture.name} | found | written


def read(document: dict[str, Any], *, base: dict[str, Any], build: Build = read_folder) -> str:
    """Answer with the facts that are otherwise than the base's, or all of the base's own."""
    found = facts_of(document, build)
    usual = {} if document == base else facts_of(base, build)
    told = {place: value for place, value in found.items() if usual.get(place) != value}
    if lost := [place for place in usual if place not in found]:
        told["-"] = lost
    return json.dumps(told)


DINOV2: dict[str, Any] = {
    "llm": {**PUBLISHED["llama"], "vocab_size": 100},
    "vision": {"architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 384, "image_size": 518, "patch_size": 14}
    | {"num_attention_heads": 6, "num_hidden_layers": 12},
    "options": {},
}
CUT_OUT = {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
DINOV2["vision"]["processor"] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], **CUT_OUT}
"""Of all published sizes: 16 x 16 of the 37 x 37 patches that have a position each are cut out."""
CONFIGS: Kinds = {
    **{name: (config, partial(read, base=config)) for name, config in PUBLISHED.items()},
    "dinov2 before a llama": (DINOV2, partial(read, base=DINOV2, build=compose_llava)),
}


def graph_of(folder: Path, name: str, **changes: Any) -> ModelGraph:
    return read_model(write_folder(folder, changed(PUBLISHED[name], changes)))


test_every_config_is_read_and_written_as_it_is_written_down = golden_test("hugging_face.txt", CONFIGS)


def test_newer_versions_nest_the_llm_of_qwen2_5_vl(tmp_path: Path) -> None:
    published, beside = PUBLISHED["qwen2.5-vl"], ("architectures", "model_type", "vision_config", "tie_word_embeddings")
    text = {key: value for key, value in published.items() if key not in ("architectures", "vision_config", "rope_scaling")}
    positions = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": text.pop("rope_theta")}
    text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": positions}
    nested = read_model(write_folder(tmp_path, {**{key: published[key] for key in beside}, "text_config": text}))
    assert nested == graph_of(tmp_path, "qwen2.5-vl")


def test_a_whole_omni_model_is_its_thinker(tmp_path: Path) -> None:
    thinker = {**PUBLISHED["qwen2.5-omni"]["thinker_config"], "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]}
    assert read_model(write_folder(tmp_path, thinker)) == graph_of(tmp_path, "qwen2.5-omni")


@pytest.mark.parametrize("num_frames", [1, 2])
def test_patches_are_convolved_over_frames_be_they_one(num_frames: int, tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "qwen2.5-vl", **{"vision_config.temporal_patch_size": num_frames})
    assert architecture_of(graph).shapes(graph) == {"visual.patch_embed.proj.weight": (1280, 3, num_frames, 14, 14)}


def test_weights_that_nothing_is_computed_with_are_known_and_written(tmp_path: Path) -> None:
    """A tower with a norm behind it has one more layer."""
    graph = graph_of(tmp_path, "llava")
    unused = ("encoder.layers.23.mlp.fc1.bias", "post_layernorm.weight", "head.probe", "embeddings.position_ids")
    for prefix in ("vision_tower.", "vision_tower.vision_model."):
        assert all(is_unused(prefix + name, graph) for name in unused)
        assert not any(is_unused(prefix + name, graph) for name in ("encoder.layers.22.mlp.fc1.bias", "pre_layrnorm.weight"))
    assert "vision_tower.post_layernorm.weight" in LLAVA.shapes(graph)
    siglip = {"vision_config.model_type": "siglip_vision_model", "vision_config.num_hidden_layers": 27}
    shapes = LLAVA.shapes(graph_of(tmp_path, "llava", **siglip, vision_feature_select_strategy="full"))
    assert shapes["vision_tower.encoder.layers.26.mlp.fc1.weight"] == (4096, 1024)
    assert shapes["vision_tower.embeddings.patch_embedding.weight"] == (1024, 3, 14, 14)


def test_norms_over_all_heads_stay_on_whole_heads(tmp_path: Path) -> None:
    large = {"vision_config.use_qk_norm": True, "vision_config.norm_type": "rms_norm", "vision_config.attention_bias": False}
    sizes = {"vision": UnitSizes(2, data_parallel_size=1), "llm": UnitSizes(1, data_parallel_size=1)}
    with pytest.raises(PlanError, match="norms of queries and keys over all heads"):
        plan_disaggregated(graph_of(tmp_path, "internvl", **large), sizes=sizes, world_size=3)


def test_a_model_that_is_none_of_transformers_is_named_with_what_differs(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, "llava")
    (vision,) = graph.encoders
    merged = replace(graph, units=(replace(vision, projector_norm="merged"), graph.backbone))
    with pytest.raises(ModelError, match="for Llava.* unit 'vision' would need projector_norm none, found merged"):
        architecture_of(merged)
    units = (vision, replace(vision, name="other"), graph.backbone)
    with pytest.raises(ModelError, match="Omni.* would have to take image and audio, found image and image"):
        architecture_of(replace(graph, units=units, edges=(("vision", "llm"), ("other", "llm"))))
    llama = graph_of(tmp_path, "llama")
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "normalization": "LayerNorm"}
    other = ModelGraph.from_dict({"units": {"text": {"role": "backbone", **shape}}})
    with pytest.raises(ModelError, match="for LlamaForCausalLM unit 'text' would need normalization RMSNorm, found LayerNorm"):
        architecture_of(other)
    with pytest.raises(ModelError, match=r"is of another model: unit 'text' would need num_layers 32, found 2"):
        check_same_model(tmp_path, other)
    check_same_model(tmp_path, llama)


def test_a_run_may_balance_experts_of_a_model_that_does_not(tmp_path: Path) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_attention_heads": 8}
    graph = graph_of(tmp_path, "llama", **mixtral)
    shape = graph.backbone.transformer
    assert shape.experts is not None
    balanced = replace(shape, experts=replace(shape.experts, aux_loss_coeff=0.01))
    check_same_model(tmp_path, replace(graph, units=(replace(graph.backbone, transformer=balanced),)))
