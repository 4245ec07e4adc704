"""The files of examples/corpus describe a model and flags that belong together."""

from pathlib import Path

import yaml

from multimodal.cost.layers.registry import describe_layer
from multimodal.data.tokenizer import build_tokenizer
from multimodal.values.model_graph import ModelGraph

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "corpus"


def test_a_model_of_the_same_units_takes_sound_too() -> None:
    plain, graph = (ModelGraph.from_file(FOLDER / name) for name in ("model.yaml", "model_with_sound.yaml"))
    assert graph.unit_names == ("vision", "audio", "llm")
    assert (graph.unit("vision"), graph.backbone) == (plain.unit("vision"), plain.backbone)
    assert all(describe_layer(graph, unit, kind, vocab_size=384).can_be_built for unit in graph.units for kind in unit.layers)


def test_model_and_flags_fit_together() -> None:
    """The model file exists, every unit has its sizes, and the pipeline has no more stages than layers."""
    flags = yaml.safe_load((FOLDER / "config.yaml").read_text())
    graph = ModelGraph.from_file(FOLDER / flags["model"])
    assert graph.unit_names == ("vision", "llm") and graph.edges == (("vision", "llm"),)
    assert 1 <= flags["llm-pp"] <= graph.backbone.transformer.num_layers
    assert flags["global-batch-size"] % flags["micro-batch-size"] == 0
    assert build_tokenizer(flags["tokenizer-type"]).vocab_size == 265
    image = graph.unit("vision").image
    assert image is not None and image.max_pixels // (image.patch_size * image.merge_size) ** 2 == 256 < flags["seq-length"]
    assert isinstance(flags["lr"], float) and isinstance(flags["min-lr"], float)
