"""What sharing experts changes in the costs of a step: exchanges of tokens, gradients, memory."""

from dataclasses import replace

import pytest

from multimodal.cost.communication import collective_seconds
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_memory import layer_static_bytes
from multimodal.plan.unit_grid import build_unit_plan
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.cost.cost_cases import SHAPE, cluster_of

CLUSTER = cluster_of(gpus_per_node=16)
GRAPH = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **SHAPE, "experts": {"num_experts": 8}}}})
NUM_TOKENS, VOCABULARY = 1500, 512
LENGTHS = [SampleLengths(sample, (), NUM_TOKENS, 700) for sample in range(4)]
ASSIGNMENT = Assignment({"llm": tuple(((Atom(sample),),) for sample in range(4))})
EXPERT_WEIGHTS = 2 * 8 * 3 * 64 * 256
OTHER_WEIGHTS = 2 * (4 * 64 * 64 + 8 * 64) + 2 * 64 * VOCABULARY
FORWARD = Action(ActionKind.FORWARD, "llm", 0, 0, 0)


def costs_of(experts: int, **options: object) -> ModelCosts:
    sizes = UnitSizes(data_parallel_size=4, expert_parallel_size=experts)
    plan = Plan({"llm": build_unit_plan(GRAPH.unit("llm"), sizes=sizes, first_rank=0)})
    run = replace(RunOptions(transformer_impl="local"), **options)
    return ModelCosts(ASSIGNMENT.shape(GRAPH, plan), ASSIGNMENT, LENGTHS, CLUSTER, vocab_size=VOCABULARY, options=run)


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
