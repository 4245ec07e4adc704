"""Schedules of units whose tokens are spread over the same ranks: rows change hands there, and a step is so much shorter."""

from collections import Counter

import pytest

from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.schedule import Schedule

CLUSTER = Cluster.from_dict(
    {
        "gpus_per_node": 8,
        "peak_tflops": 100.0,
        "memory_gb": 80,
        "intra_node": {"bandwidth_gbytes_per_second": 1e12, "latency_us": 0.0},
        "inter_node": {"bandwidth_gbytes_per_second": 10.0, "latency_us": 5.0, "nics_per_node": 8},
    }
)
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
GRAPH = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}})
LENGTHS = [SampleLengths(sample, (ItemLengths("vision", 400, 100),), 200, 150) for sample in range(2)]
ASSIGNMENT = Assignment({"vision": (((Atom(0, 0),), (Atom(1, 0),)),), "llm": (((Atom(0),), (Atom(1),)),)})


def plan_of(*, vision_cp: int, llm_cp: int) -> Plan:
    """Both units on the same four ranks or one; what is not context parallel is tensor parallel."""
    num_ranks = max(vision_cp, llm_cp)
    units = {
        name: {
            "tensor_parallel_size": num_ranks // size,
            "context_parallel_size": size,
            "replicas": [{"stages": [{"ranks": list(range(num_ranks)), "layers": [[0, 4]]}]}],
        }
        for name, size in (("vision", vision_cp), ("llm", llm_cp))
    }
    return Plan.from_dict({"units": units})


def schedule_of(plan: Plan) -> Schedule:
    return build_schedule(BUILDERS["1f1b"], ASSIGNMENT.shape(GRAPH, plan))


@pytest.mark.parametrize(("vision_cp", "llm_cp", "num_messages"), [(1, 1, 0), (4, 4, 2), (1, 4, 2), (4, 2, 2), (2, 4, 2)])
def test_units_on_the_same_ranks_send_what_other_shares_hold(vision_cp: int, llm_cp: int, num_messages: int) -> None:
    (lane,) = schedule_of(plan_of(vision_cp=vision_cp, llm_cp=llm_cp)).lanes
    kinds = Counter(action.kind for action in lane.actions)
    messages = ("SEND_FORWARD", "RECEIVE_FORWARD", "SEND_BACKWARD", "RECEIVE_BACKWARD")
    assert [kinds[ActionKind[kind]] for kind in messages] == [num_messages] * 4


def test_a_simulated_step_is_so_much_shorter() -> None:
    seconds = []
    for size in (1, 4):
        plan = plan_of(vision_cp=size, llm_cp=size)
        costs = ModelCosts(ASSIGNMENT.shape(GRAPH, plan), ASSIGNMENT, LENGTHS, CLUSTER, vocab_size=512)
        simulation = simulate_schedule(schedule_of(plan), costs)
        seconds.append(simulation.iteration_seconds)
    assert seconds[0] / 4 < seconds[1] < seconds[0] / 3  # a backward repeats attention
