"""Stages whose computations take as long are computed once; others are told apart."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.stage_costs import COMPUTATIONS, StageCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageKey
from multimodal.values.action import Action
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.cost.test_model_costs import ASSIGNMENT, COSTS

SHAPE = Transformer(num_layers=6, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256)
RANGES = ((0, 2), (2, 4), (4, 6), (6, 8))


def costs_with(*, tensor_parallel_size: int, zero_stage: int, freeze_encoder: bool) -> ModelCosts:
    """Two vision replicas, and an LLM of four stages on ranks 2, 3, ...: its stages lie within nodes of four and across them."""
    units = (Unit("vision", Role.ENCODER, SHAPE, freeze_module=freeze_encoder), Unit("llm", Role.BACKBONE, SHAPE))
    size = tensor_parallel_size
    held = [Stage(tuple(range(3 + stage * size, 3 + (stage + 1) * size)), (layers,)) for stage, layers in enumerate(RANGES)]
    encoders = tuple(Replica((Stage((rank,), ((0, 8),)),)) for rank in (0, 1))
    plan = Plan({"vision": UnitPlan(encoders), "llm": UnitPlan((Replica(tuple(held)),), size)})
    graph = ModelGraph(units, (("vision", "llm"),))
    return replace(COSTS, shape=ASSIGNMENT.shape(graph, plan), options=RunOptions(zero_stage=zero_stage))


@pytest.mark.parametrize("freeze_encoder", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_every_computation_costs_what_it_costs_by_itself(
    tensor_parallel_size: int, zero_stage: int, freeze_encoder: bool
) -> None:
    given = {"tensor_parallel_size": tensor_parallel_size, "zero_stage": zero_stage, "freeze_encoder": freeze_encoder}
    actions = [
        Action(kind, unit, replica, stage, microbatch)
        for kind in COMPUTATIONS
        for unit, replica, stages in (("vision", 0, 1), ("vision", 1, 1), ("llm", 0, 4))
        for stage in range(stages)
        for microbatch in range(ASSIGNMENT.num_microbatches(unit, replica))
    ]
    found = [costs_with(**given).compute(action) for action in actions]
    with patch.object(StageCosts, "alike", each_by_itself):
        assert found == [costs_with(**given).compute(action) for action in actions]


def each_by_itself(costs: StageCosts, unit: str) -> Iterator[tuple[StageKey, NDArray[np.bool_]]]:
    plan = costs.stages.plan.units[unit]
    shape = plan.num_virtual_stages, plan.data_parallel_size
    for stage, replica in np.ndindex(shape):
        where = np.zeros(shape, bool)
        where[stage, replica] = True
        yield (unit, replica, stage), where


def test_only_stages_of_equal_layers_and_links_are_alike() -> None:
    """Ranks 3 and 4, the first stage's, are on two nodes of four; 5 and 6 on one, and 7 and 8 on two again."""
    alone = costs_with(tensor_parallel_size=1, zero_stage=1, freeze_encoder=False)
    assert [np.argwhere(where)[:, 0].tolist() for _, where in alone.stage_costs.alike("llm")] == [[0], [1, 2], [3]]
    for together in (
        costs_with(tensor_parallel_size=2, zero_stage=1, freeze_encoder=False),
        costs_with(tensor_parallel_size=1, zero_stage=3, freeze_encoder=False),
    ):
        assert [np.argwhere(where)[:, 0].tolist() for _, where in together.stage_costs.alike("llm")] == [[0], [1], [2], [3]]
    assert [where.tolist() for _, where in alone.stage_costs.alike("vision")] == [[[True, True]]]
    assert {layer for layer, _ in alone.stages.counts(("llm", 0, 1))} == {"transformer"}
