"""Model files of examples/ that can only be planned and simulated say so in themselves; the others can be trained."""

from pathlib import Path

import pytest

from multimodal.cost.layers.registry import describe_layer, read_model

MODELS = sorted((Path(__file__).parents[3] / "examples" / "models").glob("*.yaml"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_files_that_can_only_be_planned_say_so(path: Path) -> None:
    graph = read_model(path)
    can_train = all(describe_layer(graph, unit, kind, vocab_size=0).can_be_built for unit in graph.units for kind in unit.layers)
    says_so = "# To be planned and simulated only, not trained:" in path.read_text()
    assert says_so is not can_train
