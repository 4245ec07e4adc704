"""Encoders that feed encoders: what an item is in each of them, and models that cannot be."""

from typing import Any

import numpy as np
import pytest

from multimodal.values.errors import DataError, ModelError
from multimodal.values.length_arrays import LengthArrays
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.item_passes import count_llm_tokens, first_joined_token, pass_item
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 2, "merge_size": 2, "in_channels": 1}
ENTRY = {"role": "encoder", **SHAPE, "image": IMAGE}
JOINT = {"role": "encoder", **SHAPE, "join": "sequence", "queries": {"num_queries": 3}}
EDGES = [["one", "joint"], ["two", "joint"], ["joint", "llm"]]


def graph_of(edges: list[list[str]] = EDGES, **units: dict[str, Any]) -> ModelGraph:
    found = {"one": ENTRY, "two": ENTRY, "joint": JOINT, "llm": {"role": "backbone", **SHAPE}, **units}
    used = {name for edge in edges for name in edge}
    return ModelGraph.from_dict({"units": {name: unit for name, unit in found.items() if name in used}, "edges": edges})


def test_an_item_has_lengths_in_all_its_encoders() -> None:
    graph = graph_of()
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    assert [unit.name for unit in graph.item_encoders] == ["one"] and graph.item_units("two") == ("one", "two", "joint")
    item = pass_item(graph, ItemLengths("one", 24, 6))
    assert item[:3] == ("one", 24, 3) and item.units == ("one", "two", "joint")
    assert [item.inside(name)[1:3] for name in item.units] == [(24, 6), (24, 6), (12, 3)]
    assert count_llm_tokens(graph, graph.unit("one"), (4, 6)) == 3
    assert [first_joined_token(graph, "joint", item, source=name) for name in ("one", "two")] == [0, 6]
    arrays = LengthArrays.of([SampleLengths(7, (item, item), 5, 2), SampleLengths(8, (item,), 1, 1)])
    assert arrays.num_tokens.tolist() == [11, 4] and SampleLengths(7, (item, item), 5, 2).num_tokens == 11
    rows = arrays.items_of("joint")
    assert arrays.index_of_item[rows].tolist() == [0, 1, 0] and arrays.num_item_tokens[rows].tolist() == [12, 12, 12]
    assert arrays.take(np.array([1])).num_tokens.tolist() == [4]


def test_features_side_by_side_are_as_many() -> None:
    plain = {**ENTRY, "has_projector": False}
    joint = {**JOINT, "join": "features", "hidden_size": 128, "queries": None}
    graph = graph_of(one=plain, two={**plain, "queries": None}, joint=joint)
    item = pass_item(graph, ItemLengths("one", 24, 6))
    assert item.inside("joint")[1:3] == (6, 6) and graph.width_behind("one", 2) == 64
    alike = {**ENTRY, "hidden_size": 32, "has_projector": False, "image": {**IMAGE, "merge_size": 1}}
    graph = graph_of(
        one=alike, two={**alike, "image": {**alike["image"], "class_token": "kept"}}, joint={**joint, "hidden_size": 64}
    )
    with pytest.raises(DataError, match=r"one, two give \[24, 25\] tokens of an item; use join: sequence"):
        pass_item(graph, ItemLengths("one", 24, 24))


def test_an_encoder_that_encoders_feed_may_be_a_projector_alone() -> None:
    graph = graph_of(joint={**JOINT, "num_layers": 0})
    assert graph.unit("joint").layers == ("joined_tokens", "query_projector") and graph.unit("joint").num_inner_layers == 1
    assert ModelGraph.from_dict(graph.to_dict()) == graph


@pytest.mark.parametrize(
    ("edges", "units", "problem"),
    [
        (EDGES, {"joint": {**JOINT, "join": None}}, "'joint': is fed by one, two; give it join"),
        ([["joint", "llm"]], {}, "'joint': has join, but no encoder feeds it"),
        (EDGES, {"joint": {**JOINT, "image": IMAGE}}, "'joint': takes what one, two give; leave image"),
        ([*EDGES, ["one", "llm"]], {}, "'one': feeds the backbone, so it must have a projector and feed no encoder"),
        ([["one", "llm"]], {"one": {**ENTRY, "has_projector": False}}, "feeds the backbone, so it must have a projector"),
        (
            EDGES,
            {"two": {**ENTRY, "image": {**IMAGE, "patch_size": 4}}},
            "'two': takes the items of 'one', but cuts them otherwise",
        ),
        (EDGES, {"joint": {**JOINT, "join": "features"}}, r"one, two give 16 \+ 16 channels, but hidden_size is 16"),
        (EDGES, {"one": {**ENTRY, "has_projector": False}}, r"must each give hidden_size 16 channels, found 64 \+ 16"),
        (EDGES, {"llm": {"role": "backbone", **SHAPE, "join": "features"}}, "join belongs to encoders"),
        (EDGES, {"one": {**ENTRY, "num_layers": 0}}, "'one': num_layers must be at least 1, found 0; only an encoder that"),
        ([["llm", "one"]], {}, "edges lead from an encoder to the backbone, a generator or another encoder"),
    ],
)
def test_what_cannot_be_is_refused(edges: list[list[str]], units: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        graph_of(edges, **units)
