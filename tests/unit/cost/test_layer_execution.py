"""Collectives beside products, and what published systems do in a layer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.cost.cluster import NodeLink
from multimodal.cost.layers.collectives import LayerCollectives
from multimodal.cost.run_options import AttentionWindow, LayerExecution
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_curves import Quadratic
from tests.unit.cost.test_layer_costs import CLUSTER, GRAPH, LAYER, LOAD, PLAIN


def test_all_but_one_part_of_a_collective_runs_beside_the_products():
    collectives = LayerCollectives(tensor=Quadratic(0.0, 0.08))  # 8 s for 100 tokens

    def waiting(products: float, num_parts: int) -> float:
        return collectives.exposed_tensor(100, 10_000, products_seconds=products, num_parts=num_parts)

    assert waiting(20.0, 1) == pytest.approx(8.0)
    assert waiting(20.0, 4) == pytest.approx(2.0), "one of four parts"
    assert waiting(4.0, 4) == pytest.approx(2.0 + 4.0 * 3 / 4), "products are too short for the other three"
    assert waiting(0.0, 4) == pytest.approx(8.0)


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
            "llm", LAYER, LOAD, tensor_parallel_size=2, recompute="full"
        )
        for parts in (1, 4)
    )
    assert found.forward_waiting < plain.forward_waiting
    assert found.forward - found.forward_waiting == pytest.approx(plain.forward - plain.forward_waiting)
    assert found.input_gradient_waiting == pytest.approx(2 * found.forward_waiting)
    assert found.weight_gradient == plain.weight_gradient


def test_recomputation_that_ends_early_leaves_the_last_all_reduce_out():
    early = replace(PLAIN, execution=LayerExecution(repeated_collectives=0.5))
    for recompute, passes in ((None, 1.0), ("full", 1.5)):
        found = early.seconds("llm", LAYER, LOAD, tensor_parallel_size=2, recompute=recompute)
        assert found.input_gradient_waiting == pytest.approx(passes * found.forward_waiting)


def test_products_cut_into_parts_pay_their_constant_for_each():
    cluster = replace(CLUSTER, half_efficiency_gflop=0.5)
    whole, cut = (
        LayerCosts(GRAPH, cluster, 512, num_overlapped_parts=parts).seconds("llm", LAYER, LOAD, tensor_parallel_size=2)
        for parts in (1, 4)
    )
    constants = 3 * 4 * 0.5e9 / 50e12
    assert cut.forward - cut.forward_waiting == pytest.approx(whole.forward - whole.forward_waiting + constants)
    assert cut.weight_gradient == whole.weight_gradient


def test_a_forward_that_is_repeated_is_cut_again():
    cluster = replace(CLUSTER, half_efficiency_gflop=0.5)
    cut = LayerCosts(GRAPH, cluster, 512, num_overlapped_parts=4)
    plain, repeated = (cut.seconds("llm", LAYER, LOAD, tensor_parallel_size=2, recompute=each) for each in (None, "full"))
    assert repeated.input_gradient - plain.input_gradient == pytest.approx(plain.forward)


@pytest.mark.parametrize("full_share", [0.0, 0.25, 1.0])
def test_windows_turn_squares_into_tokens_for_their_share_of_layers(full_share):
    costs = replace(PLAIN, execution=LayerExecution(windows=(AttentionWindow("vision", 20, full_share),)))
    squares = full_share * LOAD.num_squared + (1 - full_share) * 20 * LOAD.num_tokens
    found = costs.seconds("vision", LAYER, LOAD, tensor_parallel_size=2, recompute="selective")
    expected = PLAIN.seconds("vision", LAYER, LOAD._replace(num_squared=squares), tensor_parallel_size=2, recompute="selective")
    assert found == pytest.approx(expected)
    assert costs.seconds("llm", LAYER, LOAD) == PLAIN.seconds("llm", LAYER, LOAD)
