"""Seconds of layers: closed forms, what a profile changes, collectives beside products, and packed sequences."""

from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron.runtime.orchestrator.profile_layers import packed_sizes, sizes_between
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import NodeLink, collective_seconds
from multimodal.cost.layers.collectives import GATHERED_AT_ONCE_BYTES, LayerCollectives, count_groups_at_once, held_key_bytes
from multimodal.cost.layers.layer import ActivationCase
from multimodal.cost.layers.registry import describe_layer, read_model
from multimodal.cost.seconds.layer_costs import LayerCosts, Sharing
from multimodal.cost.seconds.layer_curves import LayerCurves, PackedSize, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, sample_load
from multimodal.plan.plans_of_sizes import plan_colocated
from multimodal.schedule.execute_lanes import unit_cost
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import Lora, ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import EVEN_CLUSTER, cluster_of, graph_of
from tests.unit.cost.test_activation_memory import VOCABULARY, check_layer, fake_groups
from tests.unit.cost.test_activation_memory import graph_of as graph_of_family
from tests.unit.schedule.schedule_cases import build_case, build_graph

CLUSTER, GRAPH = cluster_of(), graph_of()
PLAIN = LayerCosts(GRAPH, CLUSTER, 512)
LAYER, HEAD = "transformer", "head"
LOAD = item_load(100, 80)


def flops(unit: str, kind: str, load: UnitLoad) -> tuple[float, float]:
    return describe_layer(GRAPH, GRAPH.unit(unit), kind, vocab_size=512).forward_flops(load)[:2]


@pytest.mark.parametrize("unit", ["vision", "llm"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_large_products_run_at_the_reachable_speed(unit, size):
    linear, attention = (part / size / 50e12 for part in flops(unit, LAYER, LOAD))
    found = PLAIN.seconds(unit, LAYER, LOAD, Sharing(tensor_parallel_size=size))
    assert found.forward - found.forward_waiting == pytest.approx(linear + attention)
    assert found.input_gradient - found.input_gradient_waiting == pytest.approx(linear + 2.5 * attention)
    assert found.weight_gradient == pytest.approx(linear)


def test_small_products_pay_a_constant_and_elementwise_work_its_bytes():
    cluster = replace(CLUSTER, half_efficiency_gflop=0.5, attention_efficiency=0.25, memory_bandwidth_gbytes_per_second=1000.0)
    linear, attention = flops("llm", LAYER, LOAD)
    found = LayerCosts(GRAPH, cluster, 512).seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=1))
    # two norms and two sums 10h and 12h, rotary 2 x 2h, swiglu 3 x 4h and 5 x 4h
    moving, moving_back = (100 * 2 * count * 64 / 1e12 for count in (10 + 4 + 12, 12 + 4 + 20))
    assert found.weight_gradient == pytest.approx((linear + 4 * 0.5e9) / 50e12)
    assert found.forward == pytest.approx((linear + 4 * 0.5e9) / 50e12 + (attention + 0.5e9) / 25e12 + moving)
    assert found.input_gradient == pytest.approx((linear + 4 * 0.5e9) / 50e12 + 2.5 * (attention + 0.5e9) / 25e12 + moving_back)


def test_recomputation_belongs_to_the_input_gradient():
    plain, selective, full = (
        PLAIN.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2, recompute=r)) for r in (None, "selective", "full")
    )
    attention = flops("llm", LAYER, LOAD)[1] / 2 / 50e12
    assert full.input_gradient == pytest.approx(plain.input_gradient + plain.forward)
    assert full.input_gradient_waiting == pytest.approx(2 * plain.input_gradient_waiting)
    assert selective.input_gradient == pytest.approx(plain.input_gradient + attention)
    assert {plain.forward, selective.forward, full.forward} == {plain.forward}
    assert PLAIN.seconds("llm", HEAD, LOAD, Sharing(recompute="full")) == PLAIN.seconds("llm", HEAD, LOAD)


def test_context_parallel_ranks_share_tokens_and_gather_keys_and_values():
    found = PLAIN.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2, context_parallel_size=2, ranks=(0, 1, 2, 3)))
    hidden = collective_seconds(100 / 2 * 64 * 2, ranks=(0, 1), cluster=CLUSTER)
    # two of the four heads: few bytes, which are gathered in one step
    heads = collective_seconds(2 * 100 * 2 * 16 * 2, ranks=(0, 2), cluster=CLUSTER)
    assert found.forward_waiting == pytest.approx(4 * hidden + heads)
    alone = PLAIN.seconds("llm", LAYER, LOAD)
    assert found.weight_gradient == pytest.approx(alone.weight_gradient / 4)
    assert found.forward - found.forward_waiting == pytest.approx((alone.forward - alone.forward_waiting) / 4)


def test_a_backward_over_context_parallel_ranks_gathers_again():
    plain, selective, full = (
        PLAIN.seconds("llm", LAYER, LOAD, Sharing(context_parallel_size=4, recompute=r)) for r in (None, "selective", "full")
    )
    linear, attention = (part / 4 / 50e12 for part in flops("llm", LAYER, LOAD))
    heads = collective_seconds(4 * 100 * 2 * 16 * 2, ranks=range(4), cluster=CLUSTER)
    assert plain.input_gradient_waiting == pytest.approx(2 * heads), "so few bytes are gathered in one step"
    assert plain.input_gradient - plain.input_gradient_waiting == pytest.approx(linear + 2.5 * attention)
    assert selective.input_gradient == pytest.approx(plain.input_gradient + attention)
    assert full.input_gradient == pytest.approx(plain.input_gradient + plain.forward + attention), "it keeps nothing and repeats"


def test_attention_of_long_sequences_hides_all_gathering_but_the_ends():
    load = item_load(400_000, 0)
    found = PLAIN.seconds("llm", LAYER, load, Sharing(context_parallel_size=4))
    head = collective_seconds(400_000 * 2 * 16 * 2, ranks=range(4), cluster=CLUSTER)
    assert found.forward_waiting == pytest.approx(head)
    assert found.input_gradient_waiting == pytest.approx(2 * head)


def test_collectives_take_longer_across_nodes():
    near, far = (PLAIN.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2, ranks=ranks)) for ranks in ((0, 1), (3, 4)))
    assert far.forward_waiting == pytest.approx(4 * (5e-6 + 100 * 64 * 2 / 2 / 5e9))
    assert far.forward - far.forward_waiting == pytest.approx(near.forward - near.forward_waiting)


def test_what_is_frozen_decides_which_gradients_count():
    seconds = PLAIN.seconds("llm", LAYER, LOAD)
    backward = {need: seconds.backward(LAYER, need) for need in BackwardNeed}
    assert backward[BackwardNeed.NONE] == 0.0
    assert backward[BackwardNeed.INPUT_GRADIENT] == seconds.input_gradient
    assert backward[BackwardNeed.FULL] == seconds.input_gradient + seconds.weight_gradient
    assert backward[BackwardNeed.WEIGHT_GRADIENT] == backward[BackwardNeed.FULL], "gradients pass through its inside"
    assert seconds.backward(HEAD, BackwardNeed.WEIGHT_GRADIENT) == seconds.weight_gradient


CURVES = LayerCurves(Quadratic(1.0, 0.1, 0.01), Quadratic(2.0, 0.2, 0.02), Quadratic(3.0, 0.3), Quadratic(0.5, 0.0, 0.01))
PROFILE = LayerProfile("CPU", "float32", {("llm", LAYER, 2, 1): CURVES})


def test_a_profile_stands_in_for_the_cluster_but_not_for_its_links():
    measured = LayerCosts(GRAPH, CLUSTER, 512, PROFILE)
    plain, found = (costs.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2)) for costs in (PLAIN, measured))
    assert found.forward == pytest.approx(1 + 10 + 100 + plain.forward_waiting)
    assert found.forward_waiting == plain.forward_waiting
    assert found.weight_gradient == pytest.approx(3 + 30)
    selective = measured.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2, recompute="selective"))
    assert selective.input_gradient - found.input_gradient == pytest.approx(0.5 + 100)
    assert measured.seconds("vision", LAYER, LOAD) == PLAIN.seconds("vision", LAYER, LOAD), "not profiled: computed"


def test_sizes_that_were_not_profiled_share_the_work_of_the_nearest():
    measured = LayerCosts(GRAPH, CLUSTER, 512, PROFILE)
    assert measured.seconds("llm", LAYER, LOAD).weight_gradient == pytest.approx(3 + 60)
    assert measured.seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=4)).weight_gradient == pytest.approx(3 + 15)
    both = {("llm", LAYER, 1, 1): CURVES, ("llm", LAYER, 8, 1): CURVES.shared(0.5)}
    found = LayerProfile("", "", both).find("llm", LAYER, 4, 1)
    assert found is not None and found.forward == Quadratic(1.0, 0.1, 0.01), "tp 8 is nearer to 4 than tp 1 is"


def test_profiles_of_other_models_are_refused():
    with pytest.raises(ConfigError, match="'transformer' of unit 'audio', which the model lacks .* profile this model"):
        LayerCosts(GRAPH, CLUSTER, 512, LayerProfile("", "", {("audio", LAYER, 1, 1): CURVES}))


@given(moving=st.floats(0.0, 10.0), computing=st.floats(0.0, 10.0), num_parts=st.integers(1, 12))
def test_waiting_is_that_of_parts_that_travel_one_after_another(moving, computing, num_parts):
    arrived = done = 0.0
    for _ in range(num_parts):  # DistTrain, Figure 13
        arrived += moving / num_parts
        done = max(arrived, done) + computing / num_parts
    collectives = LayerCollectives(tensor=Quadratic(0.0, moving / 100))
    found = collectives.exposed_tensor(100, 10_000, products_seconds=computing, num_parts=num_parts)
    assert found == pytest.approx(done - computing, abs=1e-9)


def test_every_part_pays_the_latency():
    collectives = LayerCollectives(tensor=Quadratic(0.5, 0.08))
    assert collectives.exposed_tensor(100, 10_000, products_seconds=20.0, num_parts=4) == pytest.approx((8.0 + 4 * 0.5) / 4)
    assert collectives.exposed_tensor(100, 10_000, products_seconds=0.0, num_parts=4) == pytest.approx(8.0 + 4 * 0.5)


def test_overlap_shortens_waiting_and_nothing_else():
    cluster = replace(CLUSTER, intra_node=NodeLink(100.0, latency_us=0.0))
    plain, found = (
        LayerCosts(GRAPH, cluster, 512, num_overlapped_parts=parts).seconds(
            "llm", LAYER, LOAD, Sharing(tensor_parallel_size=2, recompute="full")
        )
        for parts in (1, 4)
    )
    assert found.forward_waiting < plain.forward_waiting
    assert found.forward - found.forward_waiting == pytest.approx(plain.forward - plain.forward_waiting)
    assert found.input_gradient_waiting == pytest.approx(2 * found.forward_waiting)
    assert found.weight_gradient == plain.weight_gradient


def test_products_cut_into_parts_pay_their_constant_for_each():
    cluster = replace(CLUSTER, half_efficiency_gflop=0.5)
    whole, cut = (
        LayerCosts(GRAPH, cluster, 512, num_overlapped_parts=parts).seconds("llm", LAYER, LOAD, Sharing(tensor_parallel_size=2))
        for parts in (1, 4)
    )
    constants = 3 * 4 * 0.5e9 / 50e12
    assert cut.forward - cut.forward_waiting == pytest.approx(whole.forward - whole.forward_waiting + constants)
    assert cut.weight_gradient == whole.weight_gradient


@pytest.mark.parametrize(
    ("num_groups", "share_of_the_most", "at_once"),
    [(8, 0.0, 8), (8, 0.125, 8), (8, 0.126, 4), (6, 0.25, 3), (5, 0.3, 1), (4, 3.0, 1)],
)
def test_small_groups_of_heads_are_gathered_together(num_groups, share_of_the_most, at_once):
    bytes_per_group = share_of_the_most * GATHERED_AT_ONCE_BYTES
    assert count_groups_at_once(num_groups, bytes_per_group=bytes_per_group) == at_once
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) == min(2 * at_once, num_groups) * bytes_per_group
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) <= 2 * max(GATHERED_AT_ONCE_BYTES, bytes_per_group)


PACKED_GRAPH = graph_of()
PACKED_CURVES = LayerCurves(
    Quadratic(1.0, 0.1, 0.01, 4.0), Quadratic(2.0, 0.2, 0.02, 5.0), Quadratic(3.0, 0.3), Quadratic(0.5, 0.0, 0.01, 0.25)
)
COSTS = LayerCosts(PACKED_GRAPH, EVEN_CLUSTER, 512, LayerProfile("CPU", "float32", {("llm", "transformer", 1, 1): PACKED_CURVES}))


def test_sequences_add_up_over_items_and_samples():
    items = (ItemLengths("vision", 10, 5), ItemLengths("vision", 20, 10))
    samples = [SampleLengths(0, items, 7, 3), SampleLengths(1, (), 9, 9)]
    assert sample_load(PACKED_GRAPH.unit("vision"), samples[0]) == UnitLoad(30, 500, 15, 2)
    assert sample_load(PACKED_GRAPH.unit("vision"), samples[1]) == UnitLoad()
    assert sample_load(PACKED_GRAPH.unit("llm"), samples[0]).num_sequences == 1
    atoms = {"vision": (((Atom(0, 0), Atom(0, 1)), ()),), "llm": (((Atom(0), Atom(1)),),)}
    assignment = Assignment(atoms)
    plan = plan_colocated(PACKED_GRAPH, sizes={}, world_size=1)
    loads = AssignedLoads(assignment.shape(PACKED_GRAPH, plan), assignment, samples)
    assert [load.all.num_sequences for load in loads.computed("llm")] == [2]
    assert [load.all.num_sequences for load in loads.computed("vision")] == [2, 0]


def test_every_packed_sequence_costs_what_was_measured():
    whole, packed = item_load(100, 0), add_loads([item_load(50, 0)] * 2)
    one, two = (COSTS.seconds("llm", "transformer", load) for load in (whole, packed))
    assert two.forward - one.forward == pytest.approx(4.0 - 0.01 * 5000)
    assert two.input_gradient - one.input_gradient == pytest.approx(5.0 - 0.02 * 5000)
    assert two.weight_gradient == one.weight_gradient
    repeated = [COSTS.seconds("llm", "transformer", packed, Sharing(recompute=recompute)) for recompute in ("selective", "full")]
    assert repeated[0].input_gradient - two.input_gradient == pytest.approx(0.5 + 0.01 * 5000 + 2 * 0.25)
    assert repeated[1].input_gradient - two.input_gradient == pytest.approx(two.forward)


def test_more_ranks_share_tokens_but_not_the_calls_for_each_sequence():
    found = COSTS.curves("llm", "transformer", tensor_parallel_size=2, context_parallel_size=1).forward
    assert found == Quadratic(1.0, 0.05, 0.005, 4.0)


def test_profiled_sizes_are_packed_evenly():
    assert packed_sizes([16, 100], (1, 8)) == (PackedSize(16), PackedSize(100), PackedSize(96, 8))
    assert packed_sizes([32], (8,)) == (PackedSize(32, 8),) and PackedSize(32, 8).num_squared == 8 * 4**2
    held_out = sizes_between([64, 256, 1024], (1, 4, 16))
    assert held_out == tuple(PackedSize(tokens, count) for tokens in (128, 512) for count in (1, 2, 8))
    assert not set(held_out) & set(packed_sizes([64, 256, 1024], (1, 4, 16)))


__all__ = ["fake_groups"]
MLP = ("linear_fc1", "linear_fc2")
MODULES = ("linear_qkv", "linear_proj", *MLP)
CASES = [
    ("llm", "transformer", MODULES),
    ("llm", "transformer", ("linear_qkv", "linear_fc2")),
    ("llm", "transformer", ("linear_proj", "linear_fc1")),
    ("llm", "head", ("output_layer",)),
    ("vision", "projector", MLP),
]


def adapted(graph: ModelGraph, unit: str, kind: str, modules: tuple[str, ...]) -> ModelGraph:
    lora = Lora(3, 6.0, tuple(f"{kind}.{name}" for name in modules))
    units = (
        replace(each, lora=lora, untie_embeddings_and_output_weights=True) if each.name == unit else each for each in graph.units
    )
    return replace(graph, units=tuple(units))


@pytest.mark.deep(when=lambda dtype, shape: (dtype == torch.bfloat16) != (shape == "gpt"))
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama", "gpt"])
@pytest.mark.parametrize(("unit", "kind", "modules"), CASES)
def test_layers_have_and_keep_what_is_predicted(unit, kind, modules, shape, dtype, recompute):
    graph = adapted(graph_of_family(shape), unit, kind, modules)
    layer, stage = check_layer(graph, unit, kind, dtype=dtype, recompute=recompute, within=0.02)
    assert layer.num_trained_weights(BackwardNeed.FULL) == sum(each.numel() for each in stage.parameters() if each.requires_grad)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_an_adapter_behind_attention_keeps_no_second_output(implementation):
    graph = adapted(graph_of_family("llama"), "llm", "transformer", ("linear_proj",))
    case = ActivationCase(BackwardNeed.FULL, 2, implementation)
    layer = describe_layer(graph, graph.unit("llm"), "transformer", vocab_size=512)
    frozen = layer.saved_bytes(LOAD, case._replace(need=BackwardNeed.INPUT_GRADIENT))
    assert layer.activation_bytes(LOAD, case)[:2] == frozen[:2]


def test_weight_gradients_are_those_of_adapters_alone():
    graph = adapted(graph_of_family("llama"), "llm", "transformer", MODULES[:2])
    layer = describe_layer(graph, graph.backbone, "transformer", vocab_size=VOCABULARY)
    load = UnitLoad(10, 100, 3, 1)
    weights = 3 * (64 + 128) + 3 * (64 + 64)
    assert layer.weight_gradient_flops(load) == layer.adapter_flops(load) == 2.0 * 10 * weights
    whole = describe_layer(graph_of_family("llama"), graph.backbone, "head", vocab_size=VOCABULARY)
    assert whole.weight_gradient_flops(load) == whole.forward_flops(load).linear


def test_a_stage_with_adapters_passes_its_gradient_on_and_little_else():
    graph = build_graph("vision")
    lora = Lora(2, None, ("transformer.linear_qkv",))
    with_adapters = replace(graph, units=(graph.units[0], replace(graph.units[1], lora=lora)))
    action = Action(ActionKind.BACKWARD, "llm", 0, 1, 0)
    costs = [
        unit_cost(action, build_case(each, {"vision": (1, 1, 1), "llm": (1, 2, 1)}, {"vision": [[[0]]], "llm": [[[0]]]}))
        for each in (graph, with_adapters)
    ]
    assert costs == [2, 1]


def test_a_model_file_may_name_patterns(tmp_path):
    shape = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    units = {
        "vision": {"role": "encoder", **shape, "lora": {"rank": 2, "targets": ["*_fc1"]}},
        "llm": {"role": "backbone", **shape},
    }
    units["llm"]["lora"] = {"rank": 4, "alpha": 8}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    graph = read_model(tmp_path / "model.yaml")
    assert graph.unit("vision").lora == Lora(2, None, ("transformer.linear_fc1", "projector.linear_fc1"))
    assert graph.unit("llm").lora == Lora(4, 8.0, tuple(f"transformer.{name}" for name in MODULES))
    assert [graph.unit("llm").is_trainable(index) for index in range(4)] == [False, True, True, False]
    assert ModelGraph.from_dict(graph.to_dict()) == graph
