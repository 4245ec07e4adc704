from dataclasses import replace

import pytest

from multimodal.plan.planners import TEMPLATE_PLANNERS
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.templates.chain import Chain
from multimodal.plan.planners.templates.plan_templates import place_stages, plan_templates, size_chains
from multimodal.plan.planners.templates.template_plan import plan_instances
from multimodal.plan.planners.templates.template_set import Instance, TemplateSet
from multimodal.values.errors import PlanError
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import CLUSTER, GRAPHS, TEXT_ONLY, frozen, request, with_memory
from tools.show_plans import describe_templates


@pytest.mark.parametrize("name", GRAPHS)
def test_templates_hold_all_layers_on_all_gpus_of_their_nodes(name):
    graph = GRAPHS[name]
    asked = with_memory(request(graph, num_gpus=24, micro_batch_size=1), 0.9)
    found = plan_templates(asked, fault_tolerance=1)
    sizes = [template.nodes for template in found.templates]
    assert sizes == list(range(found.least_nodes, 6 - found.least_nodes + 1))
    assert sum(each.nodes for each in found.instances) == 6 and len(found.instances) >= 2
    assert sum(each.num_microbatches for each in found.instances) == 24
    for template in found.templates:
        layers = [layer for stage in template.stages for layer in stage.layers]
        assert layers == list(range(sum(len(unit.layers) for unit in graph.units)))
        assert template.num_microbatches == -(-24 * template.nodes // 6)
        for node in range(template.nodes):
            assert sum(stage.gpus for stage in template.stages if stage.node == node) == CLUSTER.gpus_per_node


def test_the_set_survives_its_file(tmp_path):
    found = plan_templates(request(num_gpus=12), fault_tolerance=1)
    for name in ("set.yaml", "set.json"):
        found.to_file(tmp_path / name)
        assert TemplateSet.from_file(tmp_path / name) == found


def test_a_file_that_was_changed_for_the_worse_is_refused(tmp_path):
    found = plan_templates(request(num_gpus=12), fault_tolerance=1)
    plain = found.to_dict()
    cases = [
        ({"num_nodes": 4}, "have 4 nodes together"),
        ({"fault_tolerance": 7}, "at least 8"),
        ({"templates": plain["templates"][::-1]}, "consecutive numbers of nodes"),
        ({"layer_bytes": [1]}, "layer_bytes has 1 entries"),
        ({"gpus_per_node": 8}, "must use the 8 GPUs of each node"),
    ]
    for change, problem in cases:
        with pytest.raises(PlanError, match=problem):
            TemplateSet.from_dict({**plain, **change})
    with pytest.raises(PlanError, match="unknown key 'instance'"):
        TemplateSet.from_dict({**plain, "instance": 1})


def test_memory_decides_about_the_smallest_template():
    wide, tight = (plan_templates(with_memory(request(TEXT_ONLY, num_gpus=24), gb), fault_tolerance=1) for gb in (16.0, 0.5))
    assert wide.least_nodes == 1 and tight.least_nodes > 1
    assert tight.fewest_nodes == 2 * tight.least_nodes


def test_replicas_that_share_state_need_fewer_nodes_each_and_are_more():
    fixed = {"llm": FixedSizes(tensor_parallel_size=1)}
    asked = (with_memory(request(TEXT_ONLY, num_gpus=gpus, micro_batch_size=1, fixed_sizes=fixed), 0.6) for gpus in (16, 32))
    whole, shared = (
        plan_templates(one, fault_tolerance=1, replicas_per_copy=count) for one, count in zip(asked, (1, 3), strict=True)
    )
    assert (whole.least_nodes, shared.least_nodes) == (2, 1)
    assert shared.fewest_nodes == 6 and len(shared.instances) >= 6
    assert shared.most_nodes <= 8 - 5 * shared.least_nodes
    assert (whole.num_state_copies >= len(whole.instances), shared.num_state_copies) == (True, 2)
    assert "fault tolerance 1 with 3 replicas to a copy of the state" in next(describe_templates(shared))
    with pytest.raises(PlanError, match="fix the same tp for all units"):
        plan_templates(request(TEXT_ONLY, num_gpus=48), fault_tolerance=1, replicas_per_copy=3)
    with pytest.raises(PlanError, match="asks for 8 replicas.*use a fault tolerance of at most 0, or at least 32 GPUs"):
        plan_templates(request(TEXT_ONLY, num_gpus=16), fault_tolerance=1, replicas_per_copy=4)


def test_a_stage_keeps_as_many_microbatches_as_there_are_stages_from_it_on():
    asked = with_memory(request(TEXT_ONLY, num_gpus=8, micro_batch_size=4, recompute="full"), 0.5)
    chain = Chain(asked)
    capacities = chain.tables.capacities
    assert 0 < (capacities == 0).sum() < capacities.size
    for template in plan_templates(asked, fault_tolerance=0).templates:
        firsts = [piece.first_layer for piece in chain.pieces]
        for behind, stage in enumerate(reversed(template.stages)):
            first = firsts.index(stage.first_layer)
            end = firsts.index(stage.last_layer + 1) if stage.last_layer + 1 in firsts else len(firsts)
            kept = min(behind + 1, template.num_microbatches)
            assert capacities[chain.sizes.index(stage.gpus), first, end] >= kept


def test_frozen_layers_take_their_forward_only():
    graph = frozen(GRAPHS["two"], "vision")
    chain = Chain(request(replace(graph, units=(replace(graph.units[0], freeze_projector=True), graph.units[1])), num_gpus=8))
    vision = [index for index, piece in enumerate(chain.pieces) if piece.unit == "vision"]
    assert (chain.seconds[1, :, vision] == 0).all() and (chain.seconds[0, :, vision] > 0).all()


@pytest.mark.parametrize(
    ("changes", "fault_tolerance", "problem"),
    [
        ({"num_gpus": 10}, 1, "10 GPUs are no multiple of the 4 of a node; use 8 or 12"),
        ({"num_gpus": 2}, 0, "2 GPUs are no multiple of the 4 of a node; use 4"),
        ({"num_gpus": 4}, 1, "4 GPUs make 1 of 4; use a fault tolerance of at most 0, or at least 8 GPUs"),
        ({"num_gpus": 8}, -1, "fault tolerance must be at least 0"),
        ({"num_gpus": 8, "fixed_sizes": {"llm": FixedSizes(pipeline_parallel_size=2)}}, 1, "pp 2 is fixed.*fix tp only"),
        ({"num_gpus": 8, "fixed_sizes": {"llm": FixedSizes(context_parallel_size=2)}}, 1, "cp 2 is fixed"),
        ({"num_gpus": 8, "sharding": "optim_grads_params"}, 1, "do not share weights"),
        ({"num_gpus": 8, "global_batch_size": 1}, 1, "1 microbatches cannot be shared by 2 replicas"),
    ],
)
def test_wrong_requests_are_refused_with_what_would_work(changes, fault_tolerance, problem):
    with pytest.raises(PlanError, match=f"planner 'oobleck': .*{problem}"):
        TEMPLATE_PLANNERS["oobleck"](request(**changes), fault_tolerance=fault_tolerance)


def test_too_little_memory_is_refused_with_what_would_work():
    tight = with_memory(request(TEXT_ONLY, num_gpus=16), 0.5)
    least = plan_templates(tight, fault_tolerance=0).least_nodes
    with pytest.raises(PlanError, match=f"3 x {least} = {3 * least} nodes, but there are 4; use {12 * least} GPUs"):
        plan_templates(tight, fault_tolerance=2)
    with pytest.raises(PlanError, match="no number of nodes up to 4096 holds a whole replica"):
        plan_templates(with_memory(request(TEXT_ONLY, num_gpus=16), 0.01), fault_tolerance=1)


def test_stages_fill_nodes_in_any_order():
    for gpus in ((1, 4, 2, 1), (2, 2, 1, 1, 1, 1, 4, 4), (1,) * 8, (4, 1, 2, 1)):
        nodes = place_stages(gpus, 4)
        used = [sum(size for size, node in zip(gpus, nodes, strict=True) if node == each) for each in range(sum(gpus) // 4)]
        assert used == [4] * len(used) and nodes[0] == 0
    assert size_chains((1, 2, 4, 8)) == [(1, 2, 4, 8)]
    assert size_chains((1, 2, 3, 6)) == [(1, 2, 6), (1, 3, 6)]
    assert size_chains((2, 3)) == [(2,), (3,)]


def test_any_number_of_microbatches_is_planned_for():
    found = plan_templates(request(num_gpus=8, micro_batch_size=1, global_batch_size=10**12), fault_tolerance=1)
    assert sum(each.num_microbatches for each in found.instances) == 10**12
    assert found.templates[0].iteration_seconds > 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_template_takes_as_long_as_the_simulator_says(size):
    fixed = {"llm": FixedSizes(tensor_parallel_size=size)}
    asked = request(TEXT_ONLY, num_gpus=8, micro_batch_size=1, fixed_sizes=fixed, lengths=request(TEXT_ONLY).lengths[:1])
    planned = plan_templates(asked, fault_tolerance=0)
    for template in planned.templates:
        plan = plan_instances(planned, [Instance(template.nodes, template.num_microbatches)], llm="llm")
        validate_plan(plan, graph=TEXT_ONLY, world_size=4 * template.nodes)
        run = PlannedRun(plan, micro_batch_size=1, transformer_impl=asked.implementation("1f1b"))
        simulated = predict_run(run, asked.changed(global_batch_size=template.num_microbatches))
        assert 0.9 * simulated.iteration_seconds < template.iteration_seconds <= simulated.iteration_seconds * (1 + 1e-9)
        assert simulated.peak_memory_bytes <= asked.memory_bytes
