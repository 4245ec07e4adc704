"""One measured step sets the speed of computation."""

import pytest

from benchmarks.published_setups.calibrate_compute import calibrate_compute, scale_compute
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.values.errors import ConfigError

CLUSTER = Cluster(8, 100.0, 80.0, NodeLink(300.0, 4.0), Network(50.0, 8.0, 8), efficiency=0.5, half_efficiency_gflop=2.0)


def step_seconds(cluster: Cluster) -> float:
    """Two kinds of work of which the slower counts, and communication that no speed changes."""
    size, half = 5e9, cluster.half_efficiency_gflop * 1e9
    products = 2e13 / (cluster.flops_per_second * size / (size + half))
    return 0.3 + max(products, 0.1 + 0.5 * products)


@pytest.mark.parametrize("measured", [0.65, 0.8, 1.4, 30.0])
def test_the_prediction_meets_the_measurement(measured: float) -> None:
    found = calibrate_compute(CLUSTER, predict_seconds=step_seconds, measured_seconds=measured)
    assert step_seconds(found) == pytest.approx(measured, rel=1e-4)
    assert (found.intra_node, found.inter_node) == (CLUSTER.intra_node, CLUSTER.inter_node)


def test_all_work_changes_by_the_same_factor() -> None:
    cluster = Cluster(
        **{name: getattr(CLUSTER, name) for name in ("gpus_per_node", "peak_tflops", "memory_gb", "intra_node", "inter_node")},
        efficiency=0.6,
        attention_efficiency=0.4,
        memory_bandwidth_gbytes_per_second=2000.0,
    )
    slower = scale_compute(cluster, factor=0.5)
    assert (slower.efficiency, slower.attention_efficiency) == pytest.approx((0.3, 0.2))
    assert slower.memory_bandwidth_gbytes_per_second == pytest.approx(1000.0)


def test_attention_keeps_the_efficiency_of_products_where_it_has_none_of_its_own() -> None:
    slower = scale_compute(CLUSTER, factor=0.5)
    assert slower.attention_flops_per_second == pytest.approx(CLUSTER.attention_flops_per_second / 2)
    assert slower.memory_bandwidth_gbytes_per_second is None


def test_what_communication_alone_exceeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="communication alone"):
        calibrate_compute(CLUSTER, predict_seconds=step_seconds, measured_seconds=0.2)


def test_what_exceeds_the_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="beyond the peak"):
        calibrate_compute(CLUSTER, predict_seconds=lambda cluster: 1 / cluster.efficiency, measured_seconds=0.9)
    with pytest.raises(ConfigError, match="beyond the peak"):
        scale_compute(CLUSTER, factor=0.0)


def test_a_prediction_that_does_not_depend_on_computing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"closest found was 2 s"):
        calibrate_compute(CLUSTER, predict_seconds=lambda _: 2.0, measured_seconds=1.0)
