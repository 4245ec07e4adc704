from dataclasses import replace

import pytest

from multimodal.cost.communication import TransferCost, collective_seconds, message_cost
from multimodal.cost.flops import step_flops
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_memory import ZERO_STAGES, layer_static_bytes
from multimodal.cost.unit_load import UnitLoad, sample_load
from multimodal.values.action import Action, ActionKind, LayerRange, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import cluster_of, graph_of, layer_activation_bytes, transfer

CLUSTER, GRAPH = cluster_of(), graph_of(activation="gelu")
TWO_STAGES = [{"ranks": [4, 5], "layers": [[0, 2]]}, {"ranks": [6, 7], "layers": [[2, 4]]}]
PLAN = Plan.from_dict(
    {
        "units": {
            "vision": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (0, 1)]},
            "llm": {"tensor_parallel_size": 2, "replicas": [{"stages": TWO_STAGES}]},
        }
    }
)
LENGTHS = [SampleLengths(sample, (ItemLengths("vision", 40, 10),), 20, 15) for sample in range(4)]
ASSIGNMENT = Assignment(
    {
        "vision": tuple(tuple((Atom(s, 0),) for s in (r, r + 2)) for r in (0, 1)),
        "llm": (((Atom(0), Atom(1)), (Atom(2), Atom(3))),),
    }
)
COSTS = ModelCosts(ASSIGNMENT.shape(GRAPH, PLAN), ASSIGNMENT, LENGTHS, CLUSTER, vocab_size=512)


def test_all_computations_together_cost_the_steps_flops():
    seconds = 0.0
    for unit, num_ranks, places in (
        ("vision", 1, [(replica, 0, m) for replica in (0, 1) for m in (0, 1)]),
        ("llm", 2, [(0, stage, m) for stage in (0, 1) for m in (0, 1)]),
    ):
        for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT):
            costs = [COSTS.compute(Action(kind, unit, *place)) for place in places]
            seconds += num_ranks * sum(cost.seconds - cost.tensor_parallel_seconds for cost in costs)
    # attention's backward computes its scores again, which is not the model's work: half a forward more than step_flops counts
    loads = ((unit, sample_load(unit, sample)) for unit in GRAPH.units for sample in LENGTHS)
    repeated = sum(
        describe_layer(GRAPH, unit, kind, vocab_size=512).forward_flops(load).attention
        for unit, load in loads
        for kind in unit.layers
    )
    expected = step_flops(GRAPH, LENGTHS, vocab_size=512) + 0.5 * repeated
    assert seconds * 0.5 * 100e12 == pytest.approx(expected, rel=1e-12)


def test_messages_are_hidden_states_inside_a_unit_and_projected_items_between_units():
    inside = transfer(COSTS, Action(ActionKind.SEND_FORWARD, "llm", 0, 0, 0, Place("llm", 0, 1, 0)), shape=COSTS.shape)
    assert inside == TransferCost(pytest.approx(2e-6), pytest.approx(60 * 64 * 2 / (2 * 100e9)))
    forward = transfer(COSTS, Action(ActionKind.SEND_FORWARD, "vision", 1, 0, 0, Place("llm", 0, 0, 0)), shape=COSTS.shape)
    assert forward == TransferCost(pytest.approx(5e-6), pytest.approx(10 * 64 * 2 / 10e9), 0)
    backward = transfer(COSTS, Action(ActionKind.SEND_BACKWARD, "llm", 0, 0, 0, Place("vision", 1, 0, 0)), shape=COSTS.shape)
    assert backward == TransferCost(pytest.approx(5e-6), pytest.approx(10 * 64 * 2 / 10e9))  # ranks 4, 5: a card of their own


def test_ranks_of_a_node_share_its_network_cards():
    assert [CLUSTER.nic(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    cost = message_cost(20e9, source_ranks=(0, 1, 2, 3), target_ranks=(4, 5, 6, 7), cluster=CLUSTER)
    assert (cost.occupied_seconds, cost.link) == (pytest.approx(1.0), -1)
    assert message_cost(20e9, source_ranks=(3,), target_ranks=(4,), cluster=CLUSTER).link == 1


def test_replicas_reduce_fp32_gradients_and_gather_bf16_parameters():
    weights = 2 * (12 * 64 * 64) + 3 * 14 * 14 * 64 + 256 * (256 + 64)
    expected = 2e-6 + weights * 4 / 2 / 100e9
    assert COSTS.collective_seconds(Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0)) == pytest.approx(expected)
    gather = COSTS.collective_seconds(Action(ActionKind.GATHER_PARAMETERS, "vision", 0, 0))
    assert gather == pytest.approx(2e-6 + weights * 2 / 2 / 100e9)
    assert COSTS.collective_seconds(Action(ActionKind.REDUCE_GRADIENTS, "llm", 0, 0)) == 0.0


def test_the_parts_of_a_reduction_by_layer_make_up_the_whole():
    num_layers = len(PLAN.virtual_stage("vision", 0, 0).layers)
    whole, others, last = (
        COSTS.collective_seconds(Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0, covers=layers))
        for layers in (None, LayerRange(1, num_layers), LayerRange(0, 1))
    )
    weights = COSTS.stages.trained_weights(("vision", 0, 0))
    assert len(weights) == num_layers
    assert sum(weights) == COSTS.stages.num_weights(("vision", 0, 0), trained_only=True)
    assert others + last == pytest.approx(whole)
    assert last == pytest.approx(whole * weights[0] / sum(weights))


def test_a_ring_takes_as_many_steps_over_the_network_as_there_are_nodes_but_one():
    """Four ranks a node; 2 us inside, 5 us between."""
    assert collective_seconds(0.0, ranks=range(8), cluster=CLUSTER) == pytest.approx(6 * 2e-6 + 5e-6)
    assert collective_seconds(0.0, ranks=(0, 4, 8, 12), cluster=CLUSTER) == pytest.approx(3 * 5e-6)


def test_memory_of_a_gpt_layer_is_korthikantis():
    kept = layer_activation_bytes(GRAPH, "llm", "transformer", UnitLoad(10, 100, 0), need=BackwardNeed.FULL, vocab_size=512)
    assert kept == 32 * 64 * 10
    frozen = layer_activation_bytes(GRAPH, "llm", "transformer", UnitLoad(10, 100, 0), need=BackwardNeed.NONE, vocab_size=512)
    assert frozen == 0
    # two images of ten tokens came from the encoder; their gradients go back
    assert COSTS.memory.activation_bytes(Place("llm", 0, 0, 0)) == 32 * 64 * 60 / 2 + 2 * 10 * 64 * 2


def test_static_memory_shares_the_optimizer_over_replicas():
    weights = 2 * (12 * 64 * 64) + 3 * 14 * 14 * 64 + 256 * (256 + 64)
    gradients_on_their_way = 2.5 * 10 * 64 * 2
    assert COSTS.memory.broker_bytes(0) == gradients_on_their_way
    assert COSTS.static_bytes(0) == weights * (2 + 4 + 12 / 2) + gradients_on_their_way


def costs_with(**options):
    return replace(COSTS, options=RunOptions(**options))


def test_replicas_share_more_the_higher_the_zero_stage():
    weights = 2 * (12 * 64 * 64) + 3 * 14 * 14 * 64 + 256 * (256 + 64)
    found = [costs_with(zero_stage=stage).static_bytes(0) - COSTS.memory.broker_bytes(0) for stage in ZERO_STAGES]
    layer, projector = 12 * 64 * 64, 256 * (256 + 64)
    gathered = 2 * (layer + layer + layer) + 4 * projector  # a layer, the next one, its gradient; the projector's on its way
    assert found == [weights * 18, weights * 12, weights * 10, weights * 9 + gathered]
    assert layer_static_bytes(100, is_trained=True, data_parallel_size=2, zero_stage=0, bytes_per_element=4) == 100 * 16
    assert layer_static_bytes(100, is_trained=False, data_parallel_size=4) == 200
    assert layer_static_bytes(100, is_trained=False, data_parallel_size=4, zero_stage=3) == 50


def test_shared_weights_are_gathered_in_every_pass_where_computing_does_not_hide_it():
    plain, shared = COSTS, costs_with(zero_stage=3)
    forward, backward = (Action(kind, "vision", 0, 0, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    weights = 2 * (12 * 64 * 64) + 3 * 14 * 14 * 64 + 256 * (256 + 64)
    gathering, reducing = (2e-6 + weights * size / 2 / 100e9 for size in (2, 4))
    assert shared.compute(forward).seconds == pytest.approx(max(gathering, plain.compute(forward).seconds))
    assert shared.compute(backward).seconds == pytest.approx(max(gathering + reducing, plain.compute(backward).seconds))
    assert shared.compute(forward).tensor_parallel_seconds == pytest.approx(gathering - plain.compute(forward).seconds)
    assert shared.collective_seconds(Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0)) == 0.0
    assert shared.compute(Action(ActionKind.FORWARD, "llm", 0, 0, 0)) == plain.compute(Action(ActionKind.FORWARD, "llm", 0, 0, 0))


def test_replicas_that_share_weights_compute_together():
    """One of them has an image of four times the tokens; a third microbatch is one replica's alone."""
    lengths = [
        replace(sample, items=(ItemLengths("vision", 40 * (4 if sample.sample_id == 1 else 1), 10),)) for sample in LENGTHS
    ]
    uneven = replace(
        ASSIGNMENT, units={**ASSIGNMENT.units, "vision": (((Atom(0, 0),), (Atom(2, 0),), (Atom(3, 0),)), ((Atom(1, 0),),))}
    )
    shape = uneven.shape(GRAPH, PLAN)
    apart, together = (
        replace(COSTS, shape=shape, assignment=uneven, lengths=lengths, options=RunOptions(zero_stage=stage)) for stage in (1, 3)
    )
    small, large = (Action(ActionKind.BACKWARD, "vision", replica, 0, 0) for replica in (0, 1))
    assert apart.compute(small).seconds < apart.compute(large).seconds
    assert together.compute(small).seconds == together.compute(large).seconds >= apart.compute(large).seconds
    waited = together.compute(small).tensor_parallel_seconds - together.compute(large).tensor_parallel_seconds
    assert waited > 0
    alone = small._replace(microbatch=2)
    assert together.compute(alone).seconds == pytest.approx(together.compute(small._replace(microbatch=1)).seconds)


def test_replicas_that_share_nothing_reduce_twice_and_gather_nothing():
    reduction, gathering = (Action(kind, "vision", 0, 0) for kind in (ActionKind.REDUCE_GRADIENTS, ActionKind.GATHER_PARAMETERS))
    shares_nothing = costs_with(zero_stage=0)
    assert shares_nothing.collective_seconds(reduction) == 2 * COSTS.collective_seconds(reduction)
    assert shares_nothing.collective_seconds(gathering) == 0.0


def test_full_recomputation_keeps_inputs_and_works_on_one_layer():
    full, place = costs_with(recompute="full"), Place("llm", 0, 0, 0)
    received = 2 * 10 * 64 * 2
    assert full.memory.activation_bytes(place) == 2 * 64 * 60 / 2 + received
    assert full.static_bytes(2) - COSTS.static_bytes(2) == 32 * 64 * 60 / 2
