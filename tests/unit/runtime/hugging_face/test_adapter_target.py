"""What --save-adapter cannot write apart is refused before training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.hugging_face.save_adapter import check_adapter_target
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.hugging_face.composition import compose
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph

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
