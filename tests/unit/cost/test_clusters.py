"""The example clusters, and a product's efficiency over its size."""

from pathlib import Path

import pytest

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds, message_cost
from multimodal.values.errors import ConfigError
from tests.unit.cost.cost_cases import CLUSTER, LINKS, cluster_of

FOLDER = Path(__file__).parents[3] / "examples" / "clusters"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_file_is_read(path: Path) -> None:
    cluster = Cluster.from_file(path)
    assert 0 < cluster.efficiency <= 1 and cluster.half_efficiency_gflop > 0
    assert cluster.memory_bandwidth_gbytes_per_second is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float32, float64, found 'int8'"),
        ({"dtype": ["bfloat16"]}, r"dtype: expected one of bfloat16, float32, float64, found \['bfloat16'\]"),
        ({"efficiency": True}, "efficiency: expected a positive number, found True"),
        ({"memory_gb": "80"}, "memory_gb: expected a positive number, found '80'; write it without quotes"),
        ({"memory_gb": 10**400}, "memory_gb: expected a number of at most"),
        ({"gpus_per_node": 8.0}, "gpus_per_node: expected a positive integer, found 8.0"),
        ({"gpus_per_node": 0}, "a positive integer, found 0"),
        ({"gpus_per_node": 10**9}, "gpus_per_node: expected an integer of at most 65,536"),
        ({"intra_node": 3}, "intra_node: expected a mapping with bandwidth_gbytes_per_second, latency_us, found 3"),
        ({"intra_node": {**LINKS["intra_node"], "latency_ms": 1}}, "did you mean 'latency_us'"),
        ({"attention_efficiency": 1.5}, "attention_efficiency: a share of the peak cannot exceed 1"),
        ({"half_efficiency_gflop": -1.0}, "half_efficiency_gflop: expected a number of at least 0"),
        (
            {"inter_node": {**LINKS["inter_node"], "collective_efficiency": 1.2}},
            "collective_efficiency: a share of the bandwidth",
        ),
        (
            {"inter_node": {**LINKS["inter_node"], "collective_efficiency": 0}},
            "collective_efficiency: expected a positive number",
        ),
        ({"peak_tflops": None}, "peak_tflops: expected a positive number, found None"),
        ({"device": "H100"}, "exactly one of 'device' and 'peak_tflops'"),
        ({"gpus": 8}, "unknown key 'gpus'"),
        ({"efficiency": 2.0}, "cannot exceed 1"),
        ({"intra_node": {"latency_us": 1}}, "intra_node: 'bandwidth_gbytes_per_second' is missing"),
        ({"inter_node": {**LINKS["inter_node"], "nics_per_node": 8}}, "8 cards for 4 accelerators"),
    ],
)
def test_wrong_clusters_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.from_dict({**CLUSTER, **change})


def test_an_error_in_a_cluster_file_names_its_line(tmp_path: Path) -> None:
    text = (FOLDER / "h100.yaml").read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace("nics_per_node: ", "nics_per_node: -"))
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if "nics_per_node" in line)
    with pytest.raises(ConfigError, match=rf"cluster\.yaml, line {line}: cluster, inter_node(, nics_per_node)?: "):
        Cluster.from_file(path)


def test_a_device_brings_the_peak_of_its_dtype() -> None:
    described = {key: value for key, value in CLUSTER.items() if key != "peak_tflops"}
    cluster = Cluster.from_dict({**described, "device": "A100", "dtype": "float32"})
    assert (cluster.peak_tflops, cluster.bytes_per_element) == (19.5, 4)
    assert Cluster.from_dict({**described, "device": "H100"}).peak_tflops == 989.0
    with pytest.raises(ConfigError, match="unknown device 'Abacus'"):
        Cluster.from_dict({**described, "device": "Abacus"})


def test_collectives_over_nodes_reach_their_share_of_the_network_and_messages_all_of_it():
    network = {**LINKS["inter_node"], "nics_per_node": 1}
    networks = network, {**network, "collective_efficiency": 0.5}
    plain, shared = (cluster_of(gpus_per_node=1, inter_node=each) for each in networks)
    latency = 3 * 5e-6
    whole, part = (collective_seconds(8e9, ranks=range(4), cluster=cluster) - latency for cluster in (plain, shared))
    assert part == pytest.approx(2 * whole)
    assert message_cost(1e9, source_ranks=(0,), target_ranks=(1,), cluster=shared) == message_cost(
        1e9, source_ranks=(0,), target_ranks=(1,), cluster=plain
    )
