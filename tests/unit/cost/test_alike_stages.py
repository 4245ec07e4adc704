"""Stages whose computations take as long are computed once; others are told apart."""

from dataclasses import replace

import numpy as np

from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.cost.test_model_costs import ASSIGNMENT, COSTS

SHAPE = Transformer(num_layers=6, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256)
RANGES = ((0, 2), (2, 4), (4, 6), (6, 8))


def costs_with(*, tensor_parallel_size: int, zero_stage: int) -> ModelCosts:
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
    alone = costs_with(tensor_parallel_size=1, zero_stage=1)
    assert [np.argwhere(where)[:, 0].tolist() for _, where in alone.stage_costs.alike("llm")] == [[0], [1, 2], [3]]
    for together in (
        costs_with(tensor_parallel_size=2, zero_stage=1),
        costs_with(tensor_parallel_size=1, zero_stage=3),
    ):
        assert [np.argwhere(where)[:, 0].tolist() for _, where in together.stage_costs.alike("llm")] == [[0], [1], [2], [3]]
    assert [where.tolist() for _, where in alone.stage_costs.alike("vision")] == [[[True, True]]]
    assert {layer for layer, _ in alone.stages.counts(("llm", 0, 1))} == {"transformer"}
