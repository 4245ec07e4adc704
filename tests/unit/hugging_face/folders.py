"""Model graphs from a folder's config.json, and back."""

import json
from pathlib import Path
from typing import Any

from multimodal.cost.layers.registry import read_model
from multimodal.hugging_face.registry import architecture_of
from multimodal.values.model_graph import ModelGraph


def read_folder(folder: Path, config: dict[str, Any], processor: Any = None) -> ModelGraph:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return read_model(folder)


def written(graph: ModelGraph) -> dict[str, Any]:
    to_config = architecture_of(graph).to_config
    assert to_config is not None
    return to_config(graph)
