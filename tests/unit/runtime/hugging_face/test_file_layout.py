"""Files of an exported folder: how they are cut, which links are followed, and what adapters are written for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.runtime.hugging_face import file_layout
from megatron.runtime.hugging_face.file_layout import cut_into_files, like_files
from megatron.runtime.hugging_face.named_weights import NamedWeights, Shape
from megatron.runtime.hugging_face.save_weights import check_adapter_target
from megatron.runtime.hugging_face.weight_files import SavedWeight
from megatron.runtime.hugging_face.write_folder import check_links
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.hugging_face.composition import compose
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph

NAMES = NamedWeights({}, {"a.weight": Shape(3, 4), "b.bias": Shape(5, 1, is_vector=True), "c.weight": Shape(2, 6)})


def header_of(content: bytes) -> dict[str, object]:
    size = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + size
    assert size % 8 == 0
    return json.loads(content[8:])


def test_files_are_cut_at_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "MOST_BYTES", 70)
    layout = cut_into_files(NAMES, torch.float32)
    assert list(layout.headers) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert header_of(layout.headers["model-00001-of-00002.safetensors"]) == {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "b.bias": {"dtype": "F32", "shape": [5], "data_offsets": [48, 68]},
    }
    assert layout.index["model.safetensors.index.json"]["metadata"] == {"total_parameters": 29, "total_size": 116}
    place = layout.weights["a.weight"]
    assert place.position(2, 1) - place.start == 9 * 4
    assert layout.sizes[place.file] == len(layout.headers[place.file]) + 68


def test_a_layout_follows_other_files_with_more_rows() -> None:
    found = {
        "a.weight": SavedWeight("one.safetensors", torch.bfloat16, (2, 4)),
        "b.bias": SavedWeight("one.safetensors", torch.float32, (5,)),
        "c.weight": SavedWeight("two.safetensors", torch.bfloat16, (2, 2, 3)),
        "kept": SavedWeight("two.safetensors", torch.bfloat16, (2,)),
    }
    layout = like_files(NAMES, found, {"one.safetensors": {}, "two.safetensors": {"format": "pt"}})
    assert header_of(layout.headers["one.safetensors"]) == {
        "b.bias": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
        "a.weight": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [20, 44]},
    }
    assert header_of(layout.headers["two.safetensors"])["c.weight"] == {
        "dtype": "BF16",
        "shape": [2, 2, 3],
        "data_offsets": [0, 24],
    }
    assert layout.weights["c.weight"].position(1, 2) - layout.weights["c.weight"].start == 2 * 8


def test_one_file_needs_no_index() -> None:
    layout = cut_into_files(NAMES, torch.float16)
    assert list(layout.headers) == ["model.safetensors"]
    assert layout.index == {}


SHAPE = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {**SHAPE, "patch_size": 2, "image_size": 8}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, "vocab_size": 61}
CLIP = {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", **IMAGE}
DINOV2 = {"architectures": ["Dinov2Model"], "model_type": "dinov2", **IMAGE}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def llava(folder: Path, tower: dict[str, Any]) -> Path:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": LLAMA}
    return write(folder, {**config, "vision_config": tower})


def with_adapters_inside(graph: ModelGraph) -> ModelGraph:
    """Of the tower; all else is frozen."""
    frozen = replace(graph, units=tuple(replace(unit, freeze_module=True) for unit in graph.units))
    return adapt_units(frozen, linear_layers(frozen), rank=2, alpha=None, targets=("vision.transformer.*",))


def test_a_clip_inside_a_llava_is_written(tmp_path: Path) -> None:
    folder = llava(tmp_path / "model", CLIP)
    check_adapter_target(tmp_path / "target", graph=with_adapters_inside(read_model(folder)), like=folder)


def test_a_dinov2_inside_a_llava_is_refused(tmp_path: Path) -> None:
    folder = llava(tmp_path / "model", DINOV2)
    expected = r"--save-adapter .*unit 'vision' has adapters, and transformers calls its modules otherwise .*; use --save-hf"
    with pytest.raises(CheckpointError, match=expected):
        check_adapter_target(tmp_path / "target", graph=with_adapters_inside(read_model(folder)), like=folder)


@pytest.mark.parametrize("tower", [CLIP, DINOV2])
def test_a_tower_from_a_folder_of_its_own_is_refused(tower: dict[str, Any], tmp_path: Path) -> None:
    folders = {"llm": write(tmp_path / "llm", LLAMA), "encoders": {"vision": write(tmp_path / "vision", tower)}}
    graph = compose(**folders, merge_size=2, output=tmp_path / "model.yaml")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="unit 'vision' has adapters, .* only the LLM's are written apart; use --save-hf"):
        check_adapter_target(tmp_path / "target", graph=with_adapters_inside(graph), like=None)


def test_links_may_lead_into_the_folder_and_the_hubs_blobs_alone(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1a2b", tmp_path / "blobs"
    for each in (folder, blobs):
        each.mkdir(parents=True)
    for path in (blobs / "3c4d", folder / "a.json", tmp_path / "secret.txt"):
        path.write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/3c4d")
    (folder / "b.json").symlink_to("a.json")
    check_links(folder)
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match=r"notes.txt: is a link to .*secret.txt, outside of the folder"):
        check_links(folder)
