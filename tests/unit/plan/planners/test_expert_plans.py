"""Planners share experts where that helps, or as they are told."""

from dataclasses import replace

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import plan_to_fit
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Experts, ModelGraph
from tests.unit.plan.planners.planning_cases import LLM, TWO, request, with_memory

SHAPE = replace(LLM.transformer, num_layers=2, experts=Experts(8, ffn_hidden_size=8192))
MANY = replace(LLM, transformer=SHAPE)
GRAPH = ModelGraph((MANY,))
BESIDE = replace(TWO, units=(TWO.unit("vision"), MANY))
ONE_STAGE = {"llm": FixedSizes(tensor_parallel_size=1, pipeline_parallel_size=1)}


def shared_by(name: str, asked: PlanningRequest) -> int:
    run, prediction = plan_to_fit(PLANNERS[name], asked)
    assert prediction.peak_memory_bytes <= asked.memory_bytes
    assert run.transformer_impl == "transformer_engine"
    return run.plan.units["llm"].expert_parallel_size


@pytest.mark.deep(when=lambda name: name == "braid")
@pytest.mark.parametrize("name", ["megatron", "braid"])
def test_experts_are_shared_where_memory_asks_for_it(name: str) -> None:
    """Two layers of 8 experts with 25 M weights each: 0.4 B, whose weights and gradients alone take 2.4 GB."""
    asked = request(GRAPH, fixed_sizes=ONE_STAGE, num_gpus=8)
    assert shared_by(name, with_memory(asked, 3.2)) > 1


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "braid"])
def test_every_planner_plans_with_a_given_sharing(name: str) -> None:
    fixed = {"llm": FixedSizes(expert_parallel_size=2)}
    asked = request(BESIDE, fixed_sizes=fixed)
    run = PLANNERS[name](asked)
    assert run.plan.units["llm"].expert_parallel_size == 2
    assert run.plan.units["llm"].data_parallel_size % 2 == 0


def test_sharing_that_does_not_fit_the_experts_is_refused() -> None:
    with pytest.raises(PlanError, match="planner 'megatron': unit 'llm': expert parallel size 3 does not divide its 8 experts"):
        PLANNERS["megatron"](request(GRAPH, fixed_sizes={"llm": FixedSizes(expert_parallel_size=3)}))


def test_a_model_without_experts_is_planned_once() -> None:
    assert request(TWO).expert_parallel_sizes == (1,)
    assert request(GRAPH, num_gpus=6).expert_parallel_sizes == (1, 2, 4)
    assert request(GRAPH, fixed_sizes={"llm": FixedSizes(data_parallel_size=2)}).expert_parallel_sizes == (1, 2)
