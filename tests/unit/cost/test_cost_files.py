"""Clusters, cost tables and lists of layers: what they give, and what is refused with its place."""

from pathlib import Path

import pytest

from multimodal.cost.cluster import Cluster, collective_seconds, cost_between_nodes
from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.errors import ConfigError
from tests.unit.cost.cost_cases import CLUSTER, LINKS, cluster_of

FOLDER = Path(__file__).parents[3] / "examples" / "clusters"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_file_is_read(path: Path) -> None:
    cluster = Cluster.from_file(path)
    assert 0 < cluster.efficiency <= 1 and cluster.half_efficiency_gflop > 0
    assert cluster.memory_bandwidth_gbytes_per_second is not None


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
    assert len({cost_between_nodes(1e9, source_ranks=(0,), cluster=each) for each in (plain, shared)}) == 1


FROZEN, TRAINED = {"forward": 1.0}, {"forward": 1.0, "backward": 2.0}
PASSED_ON = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 0.0}


def table_of(units, **more):
    return CostTable.from_dict({"num_microbatches": 2, "units": units, **more})


def needs_of(units):
    model, _ = build_table_step(table_of(units))
    return {
        name: [
            layers_backward_need(model.graph, name, model.plan.virtual_stage(name, 0, stage).layers)
            for stage in range(len(entry["stages"]))
        ]
        for name, entry in units.items()
    }


def test_ranks_place_virtual_stages_and_colocated_units():
    units = {"vision": {"stages": [TRAINED] * 2}, "llm": {"upstream": ["vision"], "stages": [TRAINED] * 4, "ranks": [0, 1, 1, 0]}}
    plan = build_table_step(table_of(units))[0].plan
    assert plan.lanes == ((0,), (1,))
    assert [plan.lanes_of_stage("llm", 0, stage) for stage in range(4)] == [(0,), (1,), (1,), (0,)]


def test_gradients_exist_where_the_table_lists_them():
    full, weight, passed, none = BackwardNeed.FULL, BackwardNeed.WEIGHT_GRADIENT, BackwardNeed.INPUT_GRADIENT, BackwardNeed.NONE
    behind = {"upstream": ["vision"]}
    frozen = {"vision": {"stages": [FROZEN] * 2}, "llm": {**behind, "stages": [TRAINED] * 2}}
    assert needs_of(frozen) == {"vision": [none, none], "llm": [weight, full]}
    projector = {"vision": {"stages": [FROZEN, TRAINED]}, "llm": {**behind, "stages": [PASSED_ON] * 2}}
    assert needs_of(projector) == {"vision": [none, weight], "llm": [passed, passed]}
    inference = {"vision": {"stages": [FROZEN]}, "llm": {**behind, "stages": [FROZEN] * 2}}
    assert needs_of(inference) == {"vision": [none], "llm": [none, none]}


def test_costs_are_the_tables():
    stage = {"forward": [0.5, 0.25], "backward": [1.0, 3.0]}
    table = table_of(
        {"vision": {"stages": [FROZEN, stage]}, "llm": {"upstream": ["vision"], "stages": [PASSED_ON]}}, send_seconds=0.1
    )
    costs = TableCosts(table)
    assert [costs.compute(Action(kind, "vision", 0, 1, 1)).seconds for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)] == [
        0.25,
        3.0,
    ]
    assert costs.compute(Action(ActionKind.INPUT_GRADIENT, "vision", 0, 1, 1)).seconds == 1.5
    assert costs.compute(Action(ActionKind.WEIGHT_GRADIENT, "llm", 0, 0, 1)).seconds == 0.0
    forward = Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 1, Place("vision", 0, 1, 1))
    backward = Action(ActionKind.SEND_BACKWARD, "vision", 0, 1, 1, Place("vision", 0, 0, 1))
    assert costs.transfer(forward).latency_seconds == 0.1
    assert costs.transfer(backward).latency_seconds == 0.0  # nobody would send it
