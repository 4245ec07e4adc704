"""Seconds of all microbatches at once against those of one after the other."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.action import ActionKind
from multimodal.values.step_graph import StepGraph
from tests.unit.plan.planners.planning_cases import CLUSTER, THREE, TWO, frozen, random_lengths


@pytest.mark.parametrize("graph", [TWO, THREE, frozen(TWO, "vision")])
@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {}])
def test_seconds_of_all_stages_are_those_of_each(graph, zero_stage, num_parts, size) -> None:
    sizes = {name: UnitSizes(data_parallel_size=2, **size) for name in graph.unit_names}
    sizes["llm"] = UnitSizes(data_parallel_size=3, pipeline_parallel_size=2, **size)
    plan = plan_disaggregated(graph, sizes=sizes, world_size=sum(each.num_ranks or 0 for each in sizes.values()))
    lengths = random_lengths(graph, count=17)
    assignment = BALANCERS["orchmllm"](lengths, graph=graph, plan=plan, options=BalanceOptions(vocab_size=512))
    options = replace(RunOptions(), zero_stage=zero_stage, num_overlapped_parts=num_parts, recompute="selective")
    costs = ModelCosts(StepGraph(graph, plan, assignment), lengths, CLUSTER, 512, options)
    for unit in graph.unit_names:
        found = costs.unit_seconds(unit)
        for stage, replica in np.ndindex(found.shape):
            has_backward = costs.step.backward_need(unit, replica, stage).has_backward
            kinds = (ActionKind.FORWARD, *((ActionKind.BACKWARD,) if has_backward else ()))
            expected = costs.stage_seconds(unit, replica, stage, kinds=kinds)
            assert found[stage, replica] == pytest.approx(expected, rel=1e-12)  # Python 3.12 and later compensate in sums
