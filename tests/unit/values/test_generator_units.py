import pytest

from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.item_passes import list_conditions, pass_items
from multimodal.values.sample_lengths import ItemLengths

SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
UNITS = {
    "vision": {"role": "encoder", **SHAPE},
    "llm": {"role": "backbone", **SHAPE},
    "painter": {"role": "generator", **SHAPE},
}


def test_a_generator_stands_behind_the_backbone_by_default():
    graph = ModelGraph.from_dict({"units": UNITS})
    assert graph.edges == (("vision", "llm"), ("llm", "painter"))
    assert graph.unit("painter").layers == ("generator_projector", *["transformer"] * 2, "generator_head")
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_edges_out_of_a_generator_are_refused():
    with pytest.raises(ModelError, match="from the backbone to a generator"):
        ModelGraph.from_dict({"units": UNITS, "edges": [["vision", "llm"], ["llm", "painter"], ["painter", "llm"]]})


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([["vision", "llm"], ["vision", "painter"]], r"'painter' is fed by vision alone; add an edge \[llm, painter\]"),
        (
            [["llm", "painter"], ["vision", "painter"]],
            r"'vision': feeds painter, which takes what the backbone takes; add an edge \[",
        ),
    ],
)
def test_a_generator_and_the_encoders_that_feed_it_belong_to_the_backbone(edges, message):
    with pytest.raises(ModelError, match=message):
        ModelGraph.from_dict({"units": UNITS, "edges": edges})


def test_images_are_made_beside_the_tokens_of_the_items_before_them():
    edges = [["vision", "painter"], ["vision", "llm"], ["llm", "painter"]]
    wide = {**UNITS, "llm": {**UNITS["llm"], "hidden_size": 16}}
    graph = ModelGraph.from_dict({"units": wide, "edges": edges})
    assert graph.conditions("painter") == ("vision",) and graph.passes_items_on and not graph.gives_items_once("vision")
    assert graph.width_behind("vision", 3) == 16, "what the LLM takes"
    seen, made = ItemLengths("vision", 24, 6), ItemLengths("painter", 9, 0)
    items = pass_items(graph, [made, seen, made, seen, made])
    assert [item[:3] for item in items] == [each[:3] for each in (made, seen, made, seen, made)]
    assert [item.inside("painter")[1:3] for item in items if item.unit == "painter"] == [(9, 0), (15, 9), (21, 9)]
    assert list(list_conditions(graph, "painter", items[:4])) == [(1, 6), (3, 6)]
    assert pass_items(graph, items) == items, "whoever has passed them"
    plain = ModelGraph.from_dict({"units": wide, "edges": edges[1:]})
    assert pass_items(plain, [seen, made]) == (seen, made) and not plain.passes_items_on


def test_a_frozen_generator_behind_a_trained_backbone_passes_gradients_on():
    painter = {**UNITS["painter"], "freeze_module": True, "freeze_projector": True}
    graph = ModelGraph.from_dict({"units": {**UNITS, "painter": painter}})
    assert layers_backward_need(graph, "painter", range(4)) is BackwardNeed.INPUT_GRADIENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": {"patch_size": 0}}, "'painter', image, patch_size: expected a positive integer, found 0"),
        ({"image": {"patch_sise": 8}}, "unknown key 'patch_sise'"),
        ({"image": {}, "num_attention_heads": 4}, r"channels per head \(2\) must be divisible by 4"),
        ({"projector_hidden_size": 8}, "projector_hidden_size belongs to encoders"),
    ],
)
def test_wrong_images_of_a_generator_are_named(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelGraph.from_dict({"units": {**UNITS, "painter": {**UNITS["painter"], **changes}}})
