"""Costs of opaque modules, experts and generators: FLOPs, memory, messages."""

from dataclasses import replace

import pytest

from benchmarks.baselines import COMPARED
from multimodal.cost.cluster import collective_seconds
from multimodal.cost.flops import step_flops, unit_flops
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_memory import layer_static_bytes
from multimodal.cost.unit_load import UnitLoad, sample_load
from multimodal.plan.plans_of_sizes import UnitSizes, build_unit_plan
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import AudioInput, ImageInput, ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, pass_items
from multimodal.values.units.items import Waveform
from multimodal.values.units.unit import Opaque
from tests.unit.cost.cost_cases import EVEN_CLUSTER, SHAPE, cluster_of, transfer
from tests.unit.plan.planners.planning_cases import TWO, request

GRAPH = replace(
    TWO,
    units=tuple(
        replace(unit, image=ImageInput(image_size=28, patch_size=7, merge_size=1), module=Opaque("nowhere"))
        if unit in TWO.encoders
        else unit
        for unit in TWO.units
    ),
)
(ENCODER,) = GRAPH.encoders


def test_it_counts_as_the_layers_that_its_shape_describes() -> None:
    load = UnitLoad(32, 2 * 16**2, 32, 2)
    whole = describe_layer(GRAPH, ENCODER, "opaque", vocab_size=0)
    layer = describe_layer(GRAPH, ENCODER, "transformer", vocab_size=0)
    patches = describe_layer(GRAPH, ENCODER, "patch_embedding", vocab_size=0)
    count = ENCODER.transformer.num_layers
    assert whole.num_weights == count * layer.num_weights + patches.num_weights
    expected = count * sum(layer.forward_flops(load)) + sum(patches.forward_flops(load))
    assert sum(whole.forward_flops(load)) == pytest.approx(expected)


@pytest.mark.parametrize("planner", ["megatron", "megatron-balanced", "flops-ratio", "disttrain", "cornstarch", "optimus"])
def test_planners_leave_it_whole(planner: str) -> None:
    plan = COMPARED[planner](request(GRAPH)).plan.units[ENCODER.name]
    assert (plan.tensor_parallel_size, plan.context_parallel_size, plan.num_virtual_stages) == (1, 1, 1)


SOUND = Waveform(widths=(10, 3, 2), steps=(5, 2, 2), channels=8)


def test_a_module_that_takes_samples_counts_its_convolutions() -> None:
    unit = replace(ENCODER, image=None, audio=AudioInput(waveform=SOUND))
    layer = describe_layer(GRAPH, unit, "opaque", vocab_size=0)
    transformer = describe_layer(GRAPH, unit, "transformer", vocab_size=0)
    count, hidden = unit.transformer.num_layers, unit.transformer.hidden_size
    load = UnitLoad(10, 60, 5, 2)
    # Of the first two convolutions there are four and two times as many places as tokens.
    convolutions = 4 * 10 * 8 + 2 * 3 * 8 * 8 + 2 * 8 * 8 + 8 * hidden
    assert layer.num_weights == 10 * 8 + 3 * 8 * 8 + 2 * 8 * 8 + 8 * hidden + count * transformer.num_weights
    expected = 2 * 10 * convolutions + count * sum(transformer.forward_flops(load))
    assert sum(layer.forward_flops(load)) == pytest.approx(expected)


def test_a_module_that_takes_spectrograms_takes_the_longest_one_for_each_clip() -> None:
    unit = replace(ENCODER, image=None, audio=AudioInput(num_mel_bins=4, max_tokens=12))
    layer = describe_layer(GRAPH, unit, "opaque", vocab_size=0)
    assert layer.forward_flops(UnitLoad(5, 13, 5, 2)) == layer.forward_flops(UnitLoad(24, 288, 5, 2))


CLUSTER = cluster_of(gpus_per_node=16)
EXPERT_GRAPH = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **SHAPE, "experts": {"num_experts": 8}}}})
NUM_TOKENS, VOCABULARY = 1500, 512
LENGTHS = [SampleLengths(sample, (), NUM_TOKENS, 700) for sample in range(4)]
ASSIGNMENT = Assignment({"llm": tuple(((Atom(sample),),) for sample in range(4))})
EXPERT_WEIGHTS = 2 * 8 * 3 * 64 * 256
OTHER_WEIGHTS = 2 * (4 * 64 * 64 + 8 * 64) + 2 * 64 * VOCABULARY
FORWARD = Action(ActionKind.FORWARD, "llm", 0, 0, 0)


def costs_of(experts: int, **options: object) -> ModelCosts:
    sizes = UnitSizes(data_parallel_size=4, expert_parallel_size=experts)
    plan = Plan({"llm": build_unit_plan(EXPERT_GRAPH.unit("llm"), sizes=sizes, first_rank=0)})
    run = replace(RunOptions(transformer_impl="local"), **options)
    return ModelCosts(ASSIGNMENT.shape(EXPERT_GRAPH, plan), ASSIGNMENT, LENGTHS, CLUSTER, vocab_size=VOCABULARY, options=run)


@pytest.mark.parametrize("experts", [2, 4])
def test_tokens_travel_there_and_back_in_every_layer(experts: int) -> None:
    """Two copies of every token, of 64 values of 2 bytes; what stays on the rank does not travel."""
    alone, shared = costs_of(1).compute(FORWARD), costs_of(experts).compute(FORWARD)
    travelling = NUM_TOKENS * 2 * 64 * 2 * (experts - 1) / experts / 100e9
    assert shared.seconds - alone.seconds == pytest.approx(2 * 2 * (travelling + 2e-6))
    back = FORWARD._replace(kind=ActionKind.BACKWARD)
    added = costs_of(experts).compute(back).seconds - costs_of(1).compute(back).seconds
    assert added == pytest.approx(2 * 2 * (travelling + 2e-6))
    again = costs_of(experts, recompute="full").compute(back).seconds - costs_of(1, recompute="full").compute(back).seconds
    assert again == pytest.approx(2 * added), "the forward is repeated, with its exchanges"


def test_gradients_of_experts_are_reduced_by_those_who_hold_them() -> None:
    reduction = Action(ActionKind.REDUCE_GRADIENTS, "llm", 0, 0)
    alone, shared = (costs_of(experts).collective_seconds(reduction) for experts in (1, 2))
    assert alone == pytest.approx(collective_seconds(4 * (EXPERT_WEIGHTS + OTHER_WEIGHTS), ranks=range(4), cluster=CLUSTER))
    assert shared == pytest.approx(
        collective_seconds(4 * OTHER_WEIGHTS, ranks=range(4), cluster=CLUSTER)
        + collective_seconds(4 * EXPERT_WEIGHTS / 2, ranks=(0, 2), cluster=CLUSTER)
    )


def test_ranks_keep_their_experts_and_as_much_optimizer_state_as_before() -> None:
    stage = ("llm", 0, 0)
    alone, shared = (costs_of(experts).memory.weight_bytes(stage) for experts in (1, 4))
    assert alone == layer_static_bytes(EXPERT_WEIGHTS + OTHER_WEIGHTS, is_trained=True, data_parallel_size=4)
    assert shared == layer_static_bytes(OTHER_WEIGHTS, is_trained=True, data_parallel_size=4) + layer_static_bytes(
        EXPERT_WEIGHTS / 4, is_trained=True, data_parallel_size=1
    )
    assert alone - shared == pytest.approx((2 + 4) * EXPERT_WEIGHTS * 3 / 4), "of weights and gradients"


def test_an_update_takes_as_long_however_experts_are_shared() -> None:
    cluster = replace(CLUSTER, memory_bandwidth_gbytes_per_second=1000.0)
    sharded, whole = (
        [replace(costs_of(experts, zero_stage=stage), cluster=cluster).update_seconds for experts in (1, 4)] for stage in (1, 0)
    )
    assert sharded[0] == pytest.approx(sharded[1]) and sharded[0] > 0
    assert whole[1] < whole[0], "whole optimizers step all that their rank holds"


SHAPE = {"num_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 256, "activation": "gelu"}
GENERATOR_GRAPH = ModelGraph.from_dict(
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
            for rank, name in enumerate(GENERATOR_GRAPH.unit_names)
        }
    }
)
IMAGE = ItemLengths("painter", 40, 0)
GENERATOR_LENGTHS = [SampleLengths(0, (IMAGE, IMAGE), 20, 15), SampleLengths(1, (), 30, 30), SampleLengths(2, (IMAGE,), 10, 5)]
GENERATOR_ASSIGNMENT = Assignment({"llm": (((Atom(0), Atom(1)), (Atom(2),)),), "painter": (((Atom(0),), (Atom(2),)),)})
COSTS = ModelCosts(
    GENERATOR_ASSIGNMENT.shape(GENERATOR_GRAPH, PLAN), GENERATOR_ASSIGNMENT, GENERATOR_LENGTHS, EVEN_CLUSTER, vocab_size=512
)


def test_the_llm_hands_over_one_hidden_state_an_image():
    forward = Action(ActionKind.SEND_FORWARD, "llm", 0, 0, 0, Place("painter", 0, 0, 0))
    backward = Action(ActionKind.SEND_BACKWARD, "painter", 0, 0, 0, Place("llm", 0, 0, 0))
    for send in (forward, backward):
        assert transfer(COSTS, send, shape=COSTS.shape).occupied_seconds == pytest.approx(2 * 64 * 2 / 100e9)


def test_the_generators_flops_are_those_of_its_layers_and_head():
    """Per patch: attention and MLP of two layers, and the head's 48 values; per image, attention over all pairs, and its row."""
    with_images = step_flops(GENERATOR_GRAPH, GENERATOR_LENGTHS, vocab_size=512)
    without = step_flops(
        GENERATOR_GRAPH,
        [SampleLengths(each.sample_id, (), each.num_text_tokens, each.num_target_tokens) for each in GENERATOR_LENGTHS],
        vocab_size=512,
    )
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 256) + 32 * 48
    assert with_images - without == pytest.approx(3 * (40 * 3) * 2 * weights + 3 * 3 * 2 * 4 * 32 * 40**2 + 3 * 3 * 2 * 64 * 32)


def test_a_flow_costs_noisy_patches_and_the_times_of_each_image():
    """And more tokens of the LLM as conditions: rows of the first layer, and tokens of those between."""
    units = GENERATOR_GRAPH.to_dict()["units"]

    def with_flow(**flow):
        return ModelGraph.from_dict({"units": {**units, "painter": {**units["painter"], "flow": flow}}})

    modulation = 3 * 3 * 2 * 2 * 7 * 32 * 32
    noisy = 3 * 2 * (40 * 3) * 32 * 48
    flow = with_flow()
    assert step_flops(flow, GENERATOR_LENGTHS, vocab_size=512) - step_flops(
        GENERATOR_GRAPH, GENERATOR_LENGTHS, vocab_size=512
    ) == pytest.approx(modulation + noisy)
    told = with_flow(condition_tokens=5)
    lengths = [SampleLengths(0, pass_items(told, (IMAGE,)), 20, 15)]
    assert lengths[0].items[0].inside("painter").num_tokens == 44
    added = unit_flops(told, "painter", vocab_size=512).of(sample_load(told.unit("painter"), lengths[0]))
    added -= unit_flops(flow, "painter", vocab_size=512).of(sample_load(flow.unit("painter"), SampleLengths(0, (IMAGE,), 20, 15)))
    per_token = 2 * (4 * 32 * 32 + 2 * 32 * 256)
    assert added == pytest.approx(3 * 2 * 4 * per_token + 3 * 2 * 4 * 32 * (44**2 - 40**2) + 3 * 2 * 4 * 64 * 32)
    joint = with_flow(condition_tokens=5, has_joint_attention=True)
    load = sample_load(told.unit("painter"), lengths[0])
    maps = unit_flops(joint, "painter", vocab_size=512).of(load) - unit_flops(told, "painter", vocab_size=512).of(load)
    assert maps == pytest.approx(3 * 2 * 2 * 6 * 32 * 32), "a token has one of two sets of weights, a time both"


def test_what_encoders_give_counts_where_an_image_is_made_and_on_its_way():
    """Ten tokens before the 40 patches: in the layers between, not in the head, in the first layer beside the LLM's row alone;
    and in one message to each unit."""
    given = ModelGraph.from_dict(
        {
            "units": {"vision": {"role": "encoder", "hidden_size": 16, **SHAPE}, **GENERATOR_GRAPH.to_dict()["units"]},
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
