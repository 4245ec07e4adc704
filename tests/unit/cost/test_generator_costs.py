import pytest

from multimodal.cost.flops import step_flops, unit_flops
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.unit_load import sample_load
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.item_passes import pass_items
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import EVEN_CLUSTER, transfer

SHAPE = {"num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 256, "activation": "gelu"}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", "hidden_size": 64, **SHAPE},
            "painter": {"role": "generator", "hidden_size": 32, "image": {"patch_size": 4, "in_channels": 3}, **SHAPE},
        }
    }
)
PLAN = Plan.from_dict(
    {
        "units": {
            name: {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]}]}
            for rank, name in enumerate(GRAPH.unit_names)
        }
    }
)
IMAGE = ItemLengths("painter", 40, 0)
LENGTHS = [SampleLengths(0, (IMAGE, IMAGE), 20, 15), SampleLengths(1, (), 30, 30), SampleLengths(2, (IMAGE,), 10, 5)]
ASSIGNMENT = Assignment({"llm": (((Atom(0), Atom(1)), (Atom(2),)),), "painter": (((Atom(0),), (Atom(2),)),)})
COSTS = ModelCosts(ASSIGNMENT.shape(GRAPH, PLAN), ASSIGNMENT, LENGTHS, EVEN_CLUSTER, vocab_size=512)


def test_the_llm_hands_over_one_hidden_state_an_image():
    forward = Action(ActionKind.SEND_FORWARD, "llm", 0, 0, 0, Place("painter", 0, 0, 0))
    backward = Action(ActionKind.SEND_BACKWARD, "painter", 0, 0, 0, Place("llm", 0, 0, 0))
    for send in (forward, backward):
        assert transfer(COSTS, send, shape=COSTS.shape).occupied_seconds == pytest.approx(2 * 64 * 2 / 100e9)


def test_the_generators_flops_are_those_of_its_layers_and_head():
    """Per patch: attention and MLP of two layers, and the head's 48 values; per image, attention over all pairs, and its row."""
    with_images = step_flops(GRAPH, LENGTHS, vocab_size=512)
    without = step_flops(
        GRAPH,
        [SampleLengths(each.sample_id, (), each.num_text_tokens, each.num_target_tokens) for each in LENGTHS],
        vocab_size=512,
    )
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 256) + 32 * 48
    assert with_images - without == pytest.approx(3 * (40 * 3) * 2 * weights + 3 * 3 * 2 * 4 * 32 * 40**2 + 3 * 3 * 2 * 64 * 32)


def test_a_flow_costs_noisy_patches_and_the_times_of_each_image():
    """And more tokens of the LLM as conditions: rows of the first layer, and tokens of those between."""
    units = GRAPH.to_dict()["units"]

    def with_flow(**flow):
        return ModelGraph.from_dict({"units": {**units, "painter": {**units["painter"], "flow": flow}}})

    modulation = 3 * 3 * 2 * 2 * 7 * 32 * 32
    noisy = 3 * 2 * (40 * 3) * 32 * 48
    flow = with_flow()
    assert step_flops(flow, LENGTHS, vocab_size=512) - step_flops(GRAPH, LENGTHS, vocab_size=512) == pytest.approx(
        modulation + noisy
    )
    told = with_flow(condition_tokens=5)
    lengths = [SampleLengths(0, pass_items(told, (IMAGE,)), 20, 15)]
    assert lengths[0].items[0].inside("painter").num_tokens == 44
    added = unit_flops(told, "painter", vocab_size=512).of(sample_load(told.unit("painter"), lengths[0]))
    added -= unit_flops(flow, "painter", vocab_size=512).of(sample_load(flow.unit("painter"), SampleLengths(0, (IMAGE,), 20, 15)))
    per_token = 2 * (4 * 32 * 32 + 2 * 32 * 256)
    assert added == pytest.approx(3 * 2 * 4 * per_token + 3 * 2 * 4 * 32 * (44**2 - 40**2) + 3 * 2 * 4 * 64 * 32)


def test_what_encoders_give_counts_where_an_image_is_made_and_on_its_way():
    """Ten tokens before the 40 patches: in the layers between, not in the head, in the first layer beside the LLM's row alone;
    and in one message to each unit."""
    given = ModelGraph.from_dict(
        {
            "units": {"vision": {"role": "encoder", "hidden_size": 16, **SHAPE}, **GRAPH.to_dict()["units"]},
            "edges": [["vision", "llm"], ["llm", "painter"], ["vision", "painter"]],
        }
    )
    seen = ItemLengths("vision", 10, 10)
    lengths = [SampleLengths(0, pass_items(given, (seen, IMAGE)), 20, 15)]
    between = 2 * (4 * 32 * 32 + 2 * 32 * 256)
    flops = unit_flops(given, "painter", vocab_size=512).of(sample_load(given.unit("painter"), lengths[0]))
    assert flops == pytest.approx(3 * 2 * (50 * between + 40 * 32 * 48 + 11 * 64 * 32) + 3 * 2 * 4 * 32 * 50**2)
    projector = LAYER_KINDS["generator_projector"](given, given.unit("painter"), 512)
    assert projector.num_parameters == 2 * (64 * 32 + 32)
    stages = {"vision": 0, "llm": 1, "painter": 2}
    plan = Plan.from_dict(
        {"units": {name: {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]}]} for name, rank in stages.items()}}
    )
    assignment = Assignment({"vision": (((Atom(0, 0),),),), "llm": (((Atom(0),),),), "painter": (((Atom(0),),),)})
    costs = ModelCosts(assignment.shape(given, plan), assignment, lengths, EVEN_CLUSTER, vocab_size=512)
    for target in ("llm", "painter"):
        send = Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 0, Place(target, 0, 0, 0))
        assert transfer(costs, send, shape=costs.shape).occupied_seconds == pytest.approx(2 * 10 * 64 / 100e9)
