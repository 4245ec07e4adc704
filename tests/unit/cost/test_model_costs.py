"""Costs of a step's computations, messages and collectives, of its memory, and of its update."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from multimodal.cost.cluster import Cluster, TransferCost, collective_seconds, cost_between_nodes
from multimodal.cost.flops import step_flops
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer, read_model
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.stage_costs import update_traffic_bytes
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile, StepProfile
from multimodal.cost.step_memory import ZERO_STAGES, layer_static_bytes
from multimodal.cost.unit_load import sample_load
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.values.action import Action, ActionKind, LayerRange, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import EVEN_CLUSTER, cluster_of, graph_of, parameter_count, transfer, unit_parameters

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
    cost = cost_between_nodes(20e9, source_ranks=(0, 1, 2, 3), cluster=CLUSTER)
    assert (cost.occupied_seconds, cost.link) == (pytest.approx(1.0), -1)
    assert cost_between_nodes(20e9, source_ranks=(3,), cluster=CLUSTER).link == 1


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
    embedding, layer, projector = 3 * 14 * 14 * 64, 12 * 64 * 64, 256 * (256 + 64)
    working = 2 * (layer + layer + embedding + layer)  # a layer, its gradient, and the next two; the projector's is on its way
    assert found == [weights * 18, weights * 12, weights * 10, weights * 9 + working + 4 * projector]
    once = costs_with(zero_stage=3, reduces_once=True)
    assert once.static_bytes(0) - once.memory.broker_bytes(0) == weights * (9 + 4) + 2 * (projector + projector + 2 * layer)
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
    once, last = costs_with(zero_stage=3, reduces_once=True), backward._replace(microbatch=1)
    assert once.compute(backward).seconds == pytest.approx(max(gathering, plain.compute(backward).seconds))
    assert once.compute(last).seconds == shared.compute(last).seconds > once.compute(backward).seconds
    assert shared.compute(forward).tensor_parallel_seconds == pytest.approx(gathering - plain.compute(forward).seconds)
    assert shared.collective_seconds(Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0)) == 0.0
    assert shared.compute(Action(ActionKind.FORWARD, "llm", 0, 0, 0)) == plain.compute(Action(ActionKind.FORWARD, "llm", 0, 0, 0))


def test_replicas_that_share_weights_compute_together():
    """One of them has an image of four times the tokens; a third microbatch is one replica's alone."""
    lengths = [
        replace(sample, items=(ItemLengths("vision", 40 * (4 if sample.sample_id == 1 else 1), 10),)) for sample in LENGTHS
    ]
    vision = (((Atom(0, 0),), (Atom(2, 0),), (Atom(3, 0),)), ((Atom(1, 0),),))
    uneven = Assignment({**ASSIGNMENT.placed, "vision": vision})
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


SHAPE = Transformer(num_layers=6, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256)
RANGES = ((0, 2), (2, 4), (4, 6), (6, 8))


def alike_costs_with(*, tensor_parallel_size: int, zero_stage: int) -> ModelCosts:
    """Two vision replicas, and an LLM of four stages on ranks 2, 3, ...: its stages lie within nodes of four and across them."""
    units = (Unit("vision", Role.ENCODER, SHAPE), Unit("llm", Role.BACKBONE, SHAPE))
    size = tensor_parallel_size
    held = [Stage(tuple(range(3 + stage * size, 3 + (stage + 1) * size)), (layers,)) for stage, layers in enumerate(RANGES)]
    encoders = tuple(Replica((Stage((rank,), ((0, 8),)),)) for rank in (0, 1))
    plan = Plan({"vision": UnitPlan(encoders), "llm": UnitPlan((Replica(tuple(held)),), size)})
    graph = ModelGraph(units, (("vision", "llm"),))
    return replace(COSTS, shape=ASSIGNMENT.shape(graph, plan), options=RunOptions(zero_stage=zero_stage))


def test_only_stages_of_equal_layers_and_links_are_alike() -> None:
    """Ranks 3 and 4, the first stage's, are on two nodes of four; 5 and 6 on one, and 7 and 8 on two again."""
    alone = alike_costs_with(tensor_parallel_size=1, zero_stage=1)
    assert [np.argwhere(where)[:, 0].tolist() for _, where in alone.stage_costs.alike("llm")] == [[0], [1, 2], [3]]
    for together in (
        alike_costs_with(tensor_parallel_size=2, zero_stage=1),
        alike_costs_with(tensor_parallel_size=1, zero_stage=3),
    ):
        assert [np.argwhere(where)[:, 0].tolist() for _, where in together.stage_costs.alike("llm")] == [[0], [1], [2], [3]]
    assert [where.tolist() for _, where in alone.stage_costs.alike("vision")] == [[[True, True]]]
    assert {layer for layer, _ in alone.stages.counts(("llm", 0, 1))} == {"transformer"}


UPDATE_GRAPH = graph_of()
CURVES = LayerCurves(Quadratic(), Quadratic(), Quadratic())
STEP = StepProfile(seconds=1.0, computation_seconds=0.25, unit_update_seconds=0.5, weight_update_seconds=1e-4)
SAMPLES = (SampleLengths(0, (ItemLengths("vision", 8, 8),), 8, 8), SampleLengths(1, (), 8, 8))
ALONE = plan_colocated(UPDATE_GRAPH, sizes={}, world_size=1)


def weights(unit: str, layers: range) -> int:
    described = UPDATE_GRAPH.unit(unit)
    return sum(describe_layer(UPDATE_GRAPH, described, described.layers[layer], vocab_size=512).num_weights for layer in layers)


def costs(
    plan: Plan, *, profile: LayerProfile | None = None, cluster: Cluster = EVEN_CLUSTER, options: RunOptions | None = None
) -> ModelCosts:
    assignment = Assignment({"vision": (((Atom(0, 0),), ()),), "llm": (((Atom(0),), (Atom(1),)),)})
    return ModelCosts(assignment.shape(UPDATE_GRAPH, plan), assignment, SAMPLES, cluster, 512, options or RunOptions(), profile)


PROFILE = LayerProfile("CPU", "float32", {("llm", "transformer", 1, 1): CURVES}, STEP)


def test_every_forward_and_backward_pays_for_the_runtime_but_no_weight_gradient() -> None:
    plain, with_step = costs(ALONE, profile=replace(PROFILE, step=StepProfile())), costs(ALONE, profile=PROFILE)

    def more(kind: ActionKind, unit: str, microbatch: int) -> float:
        action = Action(kind, unit, 0, 0, microbatch)
        return with_step.compute(action).seconds - plain.compute(action).seconds

    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        assert more(kind, "llm", 1) == pytest.approx(0.25)
    assert more(ActionKind.WEIGHT_GRADIENT, "llm", 1) == 0.0
    assert more(ActionKind.FORWARD, "vision", 0) == pytest.approx(0.25)
    assert more(ActionKind.FORWARD, "vision", 1) == 0.0, "nothing runs for an empty microbatch"


def test_the_slowest_rank_decides_how_long_an_update_takes() -> None:
    own = plan_disaggregated(
        UPDATE_GRAPH, sizes={"llm": UnitSizes(pipeline_parallel_size=2), "vision": UnitSizes(data_parallel_size=1)}, world_size=3
    )
    stages = [weights("llm", stage.layers) for stage in own.units["llm"].replicas[0].virtual_stages]
    heaviest = max(*stages, weights("vision", range(len(UPDATE_GRAPH.unit("vision").layers))))
    assert costs(own, profile=PROFILE).update_seconds == pytest.approx(1.0 + 0.5 + 1e-4 * heaviest)
    everything = sum(weights(unit.name, range(len(unit.layers))) for unit in UPDATE_GRAPH.units)
    assert costs(ALONE, profile=PROFILE).update_seconds == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * everything)


@pytest.mark.parametrize(("zero_stage", "share"), [(0, 1), (1, 2), (3, 2)])
def test_replicas_that_share_an_optimizer_update_a_share(zero_stage: int, share: int) -> None:
    plan = plan_colocated(UPDATE_GRAPH, sizes={"llm": UnitSizes(tensor_parallel_size=2)}, world_size=4)
    found = costs(plan, profile=PROFILE, options=RunOptions(zero_stage=zero_stage)).update_seconds
    vision, llm = (weights(unit.name, range(len(unit.layers))) for unit in UPDATE_GRAPH.units)
    replicas = {"vision": 4 if share > 1 else 1, "llm": share}
    assert found == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * (vision / replicas["vision"] + llm / 2 / replicas["llm"]))


def test_several_copies_of_the_state_are_shared_by_fewer() -> None:
    plan = plan_colocated(UPDATE_GRAPH, sizes={"llm": UnitSizes(tensor_parallel_size=2)}, world_size=4)
    vision, llm = (weights(unit.name, range(len(unit.layers))) for unit in UPDATE_GRAPH.units)
    for copies, of_vision, of_llm in ((1, 4, 2), (2, 2, 1), (3, 1, 1)):
        found = costs(plan, profile=PROFILE, options=RunOptions(num_state_copies=copies))
        assert found.update_seconds == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * (vision / of_vision + llm / 2 / of_llm))
        state = 12 * (vision / of_vision + llm / 2 / of_llm) + 6 * (vision + llm / 2)  # bf16 weights and fp32 gradients are whole
        assert sum(found.memory.weight_bytes((unit, 0, 0)) for unit in ("vision", "llm")) == pytest.approx(state)


def test_what_is_frozen_is_not_updated() -> None:
    frozen = replace(
        UPDATE_GRAPH, units=tuple(replace(unit, freeze_module=True, freeze_projector=True) for unit in UPDATE_GRAPH.units)
    )
    trained = costs(ALONE, profile=PROFILE)
    assert replace(trained, shape=replace(trained.shape, graph=frozen)).update_seconds == 1.0


def test_without_a_profile_an_update_moves_bytes() -> None:
    assert costs(ALONE).update_seconds == 0.0, "the cluster says no bandwidth"
    fast = replace(EVEN_CLUSTER, memory_bandwidth_gbytes_per_second=1000.0)
    everything = sum(weights(unit.name, range(len(unit.layers))) for unit in UPDATE_GRAPH.units)
    # bf16: the fp32 gradient four times, master weight and two moments there and back, the weight once
    moved = pytest.approx(everything * (16 + 24 + 2) / 1e12)
    assert costs(ALONE, cluster=fast).update_seconds == moved
    assert costs(ALONE, cluster=fast, profile=replace(PROFILE, step=None)).update_seconds == moved
    assert update_traffic_bytes(4) == 16 + 16 + 8 and update_traffic_bytes(8) == 2 * update_traffic_bytes(4)


FOLDER = Path(__file__).parents[3] / "examples" / "models"
PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "golden" / "published_sizes.yaml").read_text())


@pytest.mark.parametrize("name", [*PUBLISHED["models"], *PUBLISHED["units"]])
def test_models_and_units_have_their_published_size(name):
    model, _, unit = name.partition("/")
    graph = ModelGraph.from_file(FOLDER / f"{model}.yaml")
    total, tolerance = PUBLISHED["units" if unit else "models"][name]
    found = unit_parameters(graph, graph.unit(unit)) if unit else parameter_count(graph)
    assert found == pytest.approx(total, rel=tolerance, abs=0)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_file_says_its_vocabulary_and_whether_it_can_only_be_planned(path: Path) -> None:
    graph = read_model(path)
    assert graph.backbone.vocab_size
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    can_train = all(LAYER_KINDS[kind].is_built_in(unit) for unit in graph.units for kind in unit.layers)
    says_so = "# To be planned and simulated only, not trained:" in path.read_text()
    assert says_so is not can_train
