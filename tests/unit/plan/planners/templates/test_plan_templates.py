"""Templates against the simulator, and searches for them against the formula of a step by which every mapping is tried."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.templates import template_set
from multimodal.plan.planners.templates.chain import Chain, StageTables, map_stages
from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.plan.planners.templates.reconfigure import Pipeline
from multimodal.plan.planners.templates.template_plan import plan_instances, plan_nodes
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import ActionKind
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import CLUSTER, GRAPHS, TEXT_ONLY, frozen, request, with_memory
from tests.unit.schedule.schedule_cases import one_unit
from tests.unit.without_kernels import without_kernels
from tools.show_plans import describe_templates


def simulate_1f1b(times: template_set.PipelineTimes, *, num_microbatches: int) -> float:
    schedule = BUILDERS["1f1b"](one_unit(times.num_stages, num_microbatches))
    of_kind = {ActionKind.FORWARD: times.forward, ActionKind.BACKWARD: times.backward}
    seconds = [of_kind[each.kind][each.stage] if each.kind in of_kind else 0.0 for each in schedule.work.computed]
    return max(event.end_seconds for event in execute_lanes(schedule, seconds=np.array(seconds)).events)


def idle_ticks(through, *, behind, forward, backward, num_microbatches):
    """Return the waiting time of a 1F1B stage between its first forward and its last backward; whole numbers in and out.

    through: ticks of one microbatch through the `behind` stages after it, there and back. Before the first microbatch is back,
    the stage runs `behind` more forwards; after the last one has left, as many backwards. The rest of `through` is idle time.
    With too few microbatches for a steady phase both waits are the same, and the longer one counts.
    """
    ahead = min(behind, num_microbatches - 1)
    before, after = max(0, through - ahead * forward), max(0, through - ahead * backward)
    return before + after if behind < num_microbatches - 1 else max(before, after)


def step_ticks(forward, backward, *, num_microbatches):
    """Return the ticks of a step of 1F1B: T1 + T2 + T3 of Oobleck 2.4.1.2, but never less than the slowest stage works.

    The path through stage k takes one microbatch through the stages before it, there and back, all microbatches in stage k
    itself, and its idle time (`idle_ticks`); the longest of these paths counts. If later stages are nearly as slow as stage k
    this is the formula of the paper, sum(t) + (N - S + k - 1) t_k + sum(t_k ...); if they are much faster, that formula counts
    less than the work of stage k. forward, backward: of each stage.
    """
    step = through = 0
    for behind, (ahead, back) in enumerate(zip(reversed(forward), reversed(backward), strict=True)):
        idle = idle_ticks(through, behind=behind, forward=ahead, backward=back, num_microbatches=num_microbatches)
        step = max(step + ahead + back, num_microbatches * (ahead + back) + idle)
        through += ahead + back
    return step


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
        assert template_set.TemplateSet.from_file(tmp_path / name) == found
    plain = found.to_dict()
    with pytest.raises(PlanError, match="consecutive numbers of nodes"):
        template_set.TemplateSet.from_dict({**plain, "templates": plain["templates"][::-1]})


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
        firsts = chain.bounds.tolist()
        for behind, stage in enumerate(reversed(template.stages)):
            first = firsts.index(stage.first_layer)
            end = firsts.index(stage.last_layer + 1)
            kept = min(behind + 1, template.num_microbatches)
            assert capacities[chain.sizes.index(stage.gpus), first, end] >= kept


def test_frozen_layers_take_their_forward_only():
    graph = frozen(GRAPHS["two"], "vision")
    chain = Chain(request(replace(graph, units=(replace(graph.units[0], freeze_projector=True), graph.units[1])), num_gpus=8))
    vision = [index for index, (unit, _) in enumerate(chain.pieces) if unit == "vision"]
    assert (chain.seconds[1, :, vision] == 0).all() and (chain.seconds[0, :, vision] > 0).all()


def test_too_little_memory_is_refused_with_what_would_work():
    tight = with_memory(request(TEXT_ONLY, num_gpus=16), 0.5)
    least = plan_templates(tight, fault_tolerance=0).least_nodes
    with pytest.raises(PlanError, match=f"3 x {least} = {3 * least} nodes, but there are 4; use {12 * least} GPUs"):
        plan_templates(tight, fault_tolerance=2)
    with pytest.raises(PlanError, match="no number of nodes up to 4096 holds a whole replica"):
        plan_templates(with_memory(request(TEXT_ONLY, num_gpus=16), 0.01), fault_tolerance=1)


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
        plan = plan_instances(planned, [template_set.Instance(template.nodes, template.num_microbatches)], llm="llm")
        validate_plan(plan, graph=TEXT_ONLY, world_size=4 * template.nodes)
        run = PlannedRun(plan, micro_batch_size=1, transformer_impl=asked.implementation("1f1b"))
        simulated = predict_run(run, asked.changed(global_batch_size=template.num_microbatches))
        assert 0.9 * simulated.iteration_seconds < template.iteration_seconds <= simulated.iteration_seconds * (1 + 1e-9)
        assert simulated.peak_memory_bytes <= asked.memory_bytes


VISION = Unit(
    "vision",
    Role.ENCODER,
    Transformer(1, 16, 2, 32),
    image=ImageInput(patch_size=2, merge_size=1, in_channels=1, min_pixels=4, max_pixels=64),
)
GRAPH = ModelGraph((VISION, Unit("llm", Role.BACKBONE, Transformer(2, 16, 2, 32))), (("vision", "llm"),))
"""A chain of 3 + 4 layers."""


def stage(first: int, last: int, *, node: int = 0, gpus: int = 1) -> template_set.TemplateStage:
    return template_set.TemplateStage(first, last, gpus, node, 0.01, 0.02)


def templates(
    *stages: tuple[template_set.TemplateStage, ...], num_nodes: int, fault_tolerance: int, gpus: int = 1
) -> template_set.TemplateSet:
    """Return a set whose smallest template is used at first."""
    least, tolerance = 1 + max(each.node for each in stages[0]), template_set.Tolerance(fault_tolerance)
    made = tuple(template_set.PipelineTemplate(least + index, 4, 0.1, each) for index, each in enumerate(stages))
    instances = tuple(template_set.Instance(least, 8 // (num_nodes // least)) for _ in range(num_nodes // least))
    chain = (template_set.ChainUnit("vision", 3), template_set.ChainUnit("llm", 4))
    return template_set.TemplateSet(num_nodes, gpus, tolerance, 1, 8, None, chain, (1000,) * 7, instances, made)


ONE_NODE = templates((stage(0, 4), stage(5, 6)), num_nodes=4, fault_tolerance=1, gpus=2)


def test_a_stage_may_end_one_unit_and_begin_the_next() -> None:
    found = plan_nodes(ONE_NODE, range(4), graph=GRAPH)
    first = found.plan.units["vision"].replicas[1], found.plan.units["llm"].replicas[1]
    assert [(each.ranks, each.layer_ranges) for each in first[0].stages] == [((2,), ((0, 3),))]
    assert [(each.ranks, each.layer_ranges) for each in first[1].stages] == [((2,), ((0, 2),)), ((3,), ((2, 4),))]
    assert found.nodes == (0, 1, 2, 3) and found.how == "start"


def test_ranks_are_numbered_in_the_order_of_the_nodes_that_are_left() -> None:
    before = plan_nodes(ONE_NODE, range(4), graph=GRAPH).pipelines
    found = plan_nodes(ONE_NODE, (3, 1, 0), graph=GRAPH, before=before, holding=(3, 1))
    assert found.nodes == (3, 1, 0)
    assert sum(each.num_microbatches for each in found.pipelines) == 8
    by_node = {each.nodes: found.plan.units["llm"].replicas[index].ranks for index, each in enumerate(found.pipelines)}
    assert by_node == {(3,): (0, 1), (1,): (2, 3), (0,): (4, 5)}


def test_a_node_that_was_lost_and_is_back_counts_as_new() -> None:
    before = (Pipeline((0,), 4), Pipeline((1,), 4))
    found = plan_nodes(ONE_NODE, (1, 0), graph=GRAPH, before=before, holding=(1,))
    assert sorted(each.nodes for each in found.pipelines) == [(0,), (1,)]


def test_tensor_parallel_stages_share_a_node() -> None:
    wide = templates((stage(0, 6, gpus=2),), num_nodes=2, fault_tolerance=0, gpus=2)
    plan = plan_nodes(wide, (1, 0), graph=GRAPH).plan
    assert plan.units["llm"].tensor_parallel_size == 2
    assert sorted(replica.ranks for replica in plan.units["llm"].replicas) == [(0, 1), (2, 3)]


def test_replicas_may_differ_so_that_all_nodes_are_used() -> None:
    two = (stage(0, 4), stage(5, 6, node=1))
    three = (stage(0, 3), stage(4, 4, node=1), stage(5, 6, node=2))
    found = plan_nodes(templates(two, three, num_nodes=4, fault_tolerance=1), (0, 1, 2, 3, 4), graph=GRAPH)
    assert sorted(len(each.nodes) for each in found.pipelines) == [2, 3]
    assert found.nodes == (0, 1, 2, 3, 4) and found.plan.units["llm"].is_unlike


def random_tables(draw):
    """Tables of up to six layers, some frozen, on stages of 1, 2 and 4 GPUs; half of them with little memory."""
    count, sizes = draw.randint(1, 6), np.array([1, 2, 4][: draw.randint(1, 3)])
    forward = [draw.randint(1, 6) for _ in range(count)]
    backward = [draw.choice([0, each, 2 * each]) for each in forward]
    memory = draw.choice([10**6, draw.randint(2, 20)])
    tables = np.zeros((3, len(sizes), count, count + 1), np.int64)
    for row, first in product(range(len(sizes)), range(count)):
        for end in range(first + 1, count + 1):
            slowdown = 12 * (1 + 0.3 * row) / sizes[row]
            tables[:, row, first, end] = (
                sum(int(slowdown * each) for each in forward[first:end]),
                sum(int(slowdown * each) for each in backward[first:end]),
                max(0, memory * sizes[row] // (end - first) - 1),
            )
    return StageTables(*tables, sizes)


def shortest_step(tables, num_gpus, num_microbatches):
    count, found = tables.forward.shape[1], []

    def extend(end, used, stages):
        if end == 0 and used == num_gpus:
            times = [[int(table[each]) for each in stages] for table in tables[:2]]
            found.append(step_ticks(*times, num_microbatches=num_microbatches))
        for row, first in product(range(len(tables.sizes)), range(end)):
            stage, gpus = (row, first, end), used + int(tables.sizes[row])
            if gpus <= num_gpus and tables.capacities[stage] >= min(len(stages) + 1, num_microbatches):
                extend(first, gpus, [stage, *stages])

    extend(count, 0, [])
    return min(found, default=None)


def test_mappings_are_those_of_an_exact_search():
    draw, num_impossible = random.Random(0), 0
    for _ in range(60):
        tables = random_tables(draw)
        gpus, counts = ([draw.randint(1, most) for _ in range(2)] for most in (10, 30))
        for mapping, *case in zip(map_stages(tables, num_gpus=gpus, num_microbatches=counts), gpus, counts, strict=True):
            assert (mapping and mapping.ticks) == shortest_step(tables, *case)
            num_impossible += mapping is None
            if mapping is not None:
                assert sum(mapping.gpus) == case[0] and mapping.ends[-1] == tables.forward.shape[1]
                bounds = list(zip((0, *mapping.ends), mapping.ends, strict=False))
                rows = [tables.sizes.tolist().index(each) for each in mapping.gpus]
                times = [[int(table[row, *bound]) for row, bound in zip(rows, bounds, strict=True)] for table in tables[:2]]
                assert step_ticks(*times, num_microbatches=case[1]) == mapping.ticks
    assert 10 < num_impossible < 110


def test_without_kernels_there_are_no_templates():
    with pytest.raises(PlanError, match="planned by the C\\+\\+ kernels.*pip install"):
        without_kernels(map_stages)(random_tables(random.Random(1)), num_gpus=[2], num_microbatches=[2])


def random_times(draw):
    forward = tuple(draw.uniform(0.1, 1.0) for _ in range(draw.randint(1, 8)))
    return template_set.PipelineTimes(forward, tuple(2 * each for each in forward))


def test_seconds_are_the_simulated_ones_nearly_always():
    draw, num_equal = random.Random(0), 0
    for _ in range(60):
        times = random_times(draw)
        count = draw.randint(times.num_stages, 5 * times.num_stages)
        simulated = simulate_1f1b(times, num_microbatches=count)
        assert 0.95 * simulated < times.seconds(count) <= simulated * (1 + 1e-12)
        num_equal += times.seconds(count) == pytest.approx(simulated, rel=1e-12)
    assert num_equal > 50


def test_most_microbatches_inverts_seconds():
    draw = random.Random(1)
    for _ in range(200):
        times = random_times(draw)
        count = draw.randint(1, 40)
        seconds = times.seconds(count)
        assert times.most_microbatches(seconds) == count
        assert times.most_microbatches(0.999 * seconds) < count
    assert times.seconds(0) == 0 and times.most_microbatches(0.0) == 0
