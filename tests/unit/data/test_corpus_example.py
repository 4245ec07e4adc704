"""The models of examples/corpus belong together."""

from pathlib import Path

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.values.model_graph import ModelGraph

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "corpus"


def test_a_model_of_the_same_units_takes_sound_too() -> None:
    plain, graph = (ModelGraph.from_file(FOLDER / name) for name in ("model.yaml", "model_with_sound.yaml"))
    assert graph.unit_names == ("vision", "audio", "llm")
    assert (graph.unit("vision"), graph.backbone) == (plain.unit("vision"), plain.backbone)
    assert all(LAYER_KINDS[kind].is_built_in(unit) for unit in graph.units for kind in unit.layers)
