"""A unit's own list of layers, in a model file."""

from pathlib import Path

import pytest

from multimodal.cost.layers.registry import read_model
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph

TEXT = """\
units:
  vision: {role: encoder, num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 32}
  llm:
    {role: backbone, num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 32}
"""


def read(folder: Path, layers: str, *, unit: str = "llm") -> ModelGraph:
    head, found, rest = TEXT.partition(f"  {unit}:")
    (folder / "model.yaml").write_text(
        head + found + rest.replace("ffn_hidden_size: 32", f"ffn_hidden_size: 32, layers: {layers}", 1)
    )
    return read_model(folder / "model.yaml")


def test_listed_layers_are_those_of_the_unit(tmp_path: Path) -> None:
    graph = read(tmp_path, "[token_embedding, transformer, transformer, head]")
    assert graph.backbone.layers == ("token_embedding", "transformer", "transformer", "head")
    assert graph.to_dict()["units"]["llm"]["layers"] == list(graph.backbone.layers)
    assert "layers" not in graph.to_dict()["units"]["vision"]
    assert ModelGraph.from_dict(graph.to_dict()) == graph


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("[token_embedding, transformer, head]", "layers lists 3 layers, expected num_layers + 2 = 4"),
        ("[]", "layers lists 0 layers, expected num_layers + 2 = 4"),
        ("[token_embedding, transformer, mamba, head]", "layers[2]: 'mamba' is no kind of layer that a backbone has between"),
        ("[token_embedding, transformer, head, head]", "layers[2]: 'head' is no kind of layer that a backbone has between"),
        ("[patch_embedding, transformer, transformer, head]", "'patch_embedding' is no kind of layer that a backbone has first"),
        ("[token_embedding, transformer, transformer, projector]", "has last; use one of head"),
        ("[audio_embedding, transformer, transformer, head]", "'audio_embedding' is no kind of layer that a backbone has first"),
        ("transformer", "expected a list"),
        ("[token_embedding, 1, transformer, head]", "layers[1]: expected text"),
    ],
)
def test_a_wrong_list_is_refused_with_its_line(tmp_path: Path, layers: str, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, layers)
    assert problem in str(caught.value) and "model.yaml, line 4: unit 'llm'" in str(caught.value)


@pytest.mark.parametrize(("items", "wrong"), [("audio", "patch_embedding"), ("image", "audio_embedding")])
def test_an_embedding_of_other_items_is_refused(tmp_path: Path, items: str, wrong: str) -> None:
    described = TEXT.replace(
        "role: encoder", f"role: encoder, {items}: {{}}, layers: [{wrong}, transformer, transformer, projector]"
    )
    (tmp_path / "model.yaml").write_text(described)
    with pytest.raises(ModelError, match=rf"line 2: unit 'vision', layers\[0\]: '{wrong}' is no kind of layer"):
        read_model(tmp_path / "model.yaml")
