"""Templates whose stages have one size are plans already, so the simulator can run them."""

import pytest

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request


def plan_of(template, size):
    stages, first = [], 0
    for stage in template.stages:
        layers = ((stage.first_layer, stage.last_layer + 1),)
        stages.append(Stage(tuple(range(first, first + stage.gpus)), layers))
        first += stage.gpus
    return Plan({"llm": UnitPlan((Replica(tuple(stages)),), size)})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_template_takes_as_long_as_the_simulator_says(size):
    fixed = {"llm": FixedSizes(tensor_parallel_size=size)}
    asked = request(TEXT_ONLY, num_gpus=8, micro_batch_size=1, fixed_sizes=fixed, lengths=request(TEXT_ONLY).lengths[:1])
    planned = plan_templates(asked, fault_tolerance=0)
    for template in planned.templates:
        plan = plan_of(template, size)
        validate_plan(plan, graph=TEXT_ONLY, world_size=4 * template.nodes)
        run = PlannedRun(plan, micro_batch_size=1, transformer_impl=asked.implementation("1f1b"))
        simulated = predict_run(run, asked.changed(global_batch_size=template.num_microbatches))
        assert 0.9 * simulated.iteration_seconds < template.iteration_seconds <= simulated.iteration_seconds * (1 + 1e-9)
        assert simulated.peak_memory_bytes <= asked.memory_bytes
