"""Model files, encoders that feed encoders, and generators: what would train something else than it says is refused."""

import re
from typing import Any

import numpy as np
import pytest

from multimodal.values import sample_lengths
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit

SHAPE = "num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 32"
TEXT = f"""\
units:
  vision:
    {{role: encoder, {SHAPE}}}
  llm:
    {{role: backbone, {SHAPE}}}
"""


def read(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return ModelGraph.from_file(path)


def refusal_of(tmp_path, text):
    with pytest.raises(ModelError) as caught:
        read(tmp_path, text)
    found = re.fullmatch(r".*/model\.yaml, line (\d+): (.*)", str(caught.value))
    assert found, caught.value
    return int(found[1]), found[2]


def test_a_unit_or_a_key_that_is_there_twice_is_refused(tmp_path):
    assert refusal_of(tmp_path, TEXT + f"  vision: {{role: encoder, {SHAPE}}}\n")[0] == 6
    assert refusal_of(tmp_path, TEXT.replace("encoder", "encoder, num_layers: 3"))[0] == 3


@pytest.mark.parametrize("name", ["'1'", "a b", "a/b", "'--lr'", "a=b", "_a", "'a.b'", "x" * 65])
def test_names_that_no_flag_or_schedule_can_carry_are_refused(tmp_path, name):
    assert "a unit's name starts with a letter" in refusal_of(tmp_path, TEXT.replace("llm", name))[1]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Transformer(2, 16, 2, 32, rotary_base=float("nan")), "rotary_base: expected a positive number, found nan"),
        (Transformer(10**9, 16, 2, 32), "num_layers: expected an integer of at most 10,000"),
    ],
)
def test_models_made_in_python_are_held_against_the_same_bounds(shape, message):
    with pytest.raises(ModelError, match=message):
        ModelGraph((Unit("llm", Role.BACKBONE, shape),))


EDGE_SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 2, "merge_size": 2, "in_channels": 1}
ENTRY = {"role": "encoder", **EDGE_SHAPE, "image": IMAGE}
JOINT = {"role": "encoder", **EDGE_SHAPE, "join": "sequence", "queries": {"num_queries": 3}}
EDGES = [["one", "joint"], ["two", "joint"], ["joint", "llm"]]


def graph_of(edges: list[list[str]] = EDGES, **units: dict[str, Any]) -> ModelGraph:
    found = {"one": ENTRY, "two": ENTRY, "joint": JOINT, "llm": {"role": "backbone", **EDGE_SHAPE}, **units}
    used = {name for edge in edges for name in edge}
    return ModelGraph.from_dict({"units": {name: unit for name, unit in found.items() if name in used}, "edges": edges})


def test_an_item_has_lengths_in_all_its_encoders() -> None:
    graph = graph_of()
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    assert [unit.name for unit in graph.item_encoders] == ["one"] and graph.item_units("two") == ("one", "two", "joint")
    item = sample_lengths.pass_item(graph, sample_lengths.ItemLengths("one", 24, 6))
    assert item[:3] == ("one", 24, 3) and item.units == ("one", "two", "joint")
    assert [item.inside(name)[1:3] for name in item.units] == [(24, 6), (24, 6), (12, 3)]
    assert sample_lengths.count_llm_tokens(graph, graph.unit("one"), (4, 6)) == 3
    assert [sample_lengths.first_joined_token(graph, "joint", item, source=name) for name in ("one", "two")] == [0, 6]
    arrays = sample_lengths.LengthArrays.of(
        [sample_lengths.SampleLengths(7, (item, item), 5, 2), sample_lengths.SampleLengths(8, (item,), 1, 1)]
    )
    assert arrays.num_tokens.tolist() == [11, 4] and sample_lengths.SampleLengths(7, (item, item), 5, 2).num_tokens == 11
    rows = arrays.items_of("joint")
    assert arrays.index_of_item[rows].tolist() == [0, 1, 0] and arrays.num_item_tokens[rows].tolist() == [12, 12, 12]
    assert arrays.take(np.array([1])).num_tokens.tolist() == [4]


def test_features_side_by_side_are_as_many() -> None:
    plain = {**ENTRY, "has_projector": False}
    joint = {**JOINT, "join": "features", "hidden_size": 128, "queries": None}
    graph = graph_of(one=plain, two={**plain, "queries": None}, joint=joint)
    item = sample_lengths.pass_item(graph, sample_lengths.ItemLengths("one", 24, 6))
    assert item.inside("joint")[1:3] == (6, 6) and graph.width_behind("one", 2) == 64
    alike = {**ENTRY, "hidden_size": 32, "has_projector": False, "image": {**IMAGE, "merge_size": 1}}
    graph = graph_of(
        one=alike, two={**alike, "image": {**alike["image"], "class_token": "kept"}}, joint={**joint, "hidden_size": 64}
    )
    with pytest.raises(DataError, match=r"one, two give \[24, 25\] tokens of an item; use join: sequence"):
        sample_lengths.pass_item(graph, sample_lengths.ItemLengths("one", 24, 24))


def test_an_encoder_that_encoders_feed_may_be_a_projector_alone() -> None:
    graph = graph_of(joint={**JOINT, "num_layers": 0})
    assert graph.unit("joint").layers == ("joined_tokens", "query_projector") and graph.unit("joint").num_inner_layers == 1
    assert ModelGraph.from_dict(graph.to_dict()) == graph


GENERATOR_SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
UNITS = {
    "vision": {"role": "encoder", **GENERATOR_SHAPE},
    "llm": {"role": "backbone", **GENERATOR_SHAPE},
    "painter": {"role": "generator", **GENERATOR_SHAPE},
}


def test_a_generator_stands_behind_the_backbone_by_default():
    graph = ModelGraph.from_dict({"units": UNITS})
    assert graph.edges == (("vision", "llm"), ("llm", "painter"))
    assert graph.unit("painter").layers == ("generator_projector", *["transformer"] * 2, "generator_head")
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_images_are_made_beside_the_tokens_of_the_items_before_them():
    edges = [["vision", "painter"], ["vision", "llm"], ["llm", "painter"]]
    wide = {**UNITS, "llm": {**UNITS["llm"], "hidden_size": 16}}
    graph = ModelGraph.from_dict({"units": wide, "edges": edges})
    assert graph.conditions("painter") == ("vision",) and graph.passes_items_on and not graph.gives_items_once("vision")
    assert graph.width_behind("vision", 3) == 16, "what the LLM takes"
    seen, made = sample_lengths.ItemLengths("vision", 24, 6), sample_lengths.ItemLengths("painter", 9, 0)
    items = sample_lengths.pass_items(graph, [made, seen, made, seen, made])
    assert [item[:3] for item in items] == [each[:3] for each in (made, seen, made, seen, made)]
    assert [item.inside("painter")[1:3] for item in items if item.unit == "painter"] == [(9, 0), (15, 9), (21, 9)]
    assert list(sample_lengths.list_conditions(graph, "painter", items[:4])) == [(1, 6), (3, 6)]
    assert sample_lengths.pass_items(graph, items) == items, "whoever has passed them"
    plain = ModelGraph.from_dict({"units": wide, "edges": edges[1:]})
    assert sample_lengths.pass_items(plain, [seen, made]) == (seen, made) and not plain.passes_items_on


def test_a_frozen_generator_behind_a_trained_backbone_passes_gradients_on():
    painter = {**UNITS["painter"], "freeze_module": True, "freeze_projector": True}
    graph = ModelGraph.from_dict({"units": {**UNITS, "painter": painter}})
    assert layers_backward_need(graph, "painter", range(4)) is BackwardNeed.INPUT_GRADIENT
