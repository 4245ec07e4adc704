"""Collectives beside products."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.cost.cluster import NodeLink
from multimodal.cost.layers.collectives import (
    GATHERED_AT_ONCE_BYTES,
    LayerCollectives,
    count_groups_at_once,
    held_key_bytes,
)
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_curves import Quadratic
from tests.unit.cost.test_layer_costs import CLUSTER, GRAPH, LAYER, LOAD


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


@pytest.mark.parametrize(
    ("num_groups", "share_of_the_most", "at_once"),
    [(8, 0.0, 8), (8, 0.125, 8), (8, 0.126, 4), (6, 0.25, 3), (5, 0.3, 1), (4, 3.0, 1)],
)
def test_small_groups_of_heads_are_gathered_together(num_groups: int, share_of_the_most: float, at_once: int) -> None:
    bytes_per_group = share_of_the_most * GATHERED_AT_ONCE_BYTES
    assert count_groups_at_once(num_groups, bytes_per_group=bytes_per_group) == at_once
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) == min(2 * at_once, num_groups) * bytes_per_group
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) <= 2 * max(GATHERED_AT_ONCE_BYTES, bytes_per_group)
