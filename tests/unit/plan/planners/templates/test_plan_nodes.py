"""Plans for the nodes that are there, of templates of one and two nodes."""

import pytest

from multimodal.plan.planners.templates.reconfigure import Pipeline
from multimodal.plan.planners.templates.template_plan import plan_nodes
from multimodal.plan.planners.templates.template_set import ChainUnit, Instance, PipelineTemplate, TemplateSet, TemplateStage
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Transformer, Unit

VISION = Unit(
    "vision",
    Role.ENCODER,
    Transformer(1, 16, 2, 32),
    image=ImageInput(patch_size=2, merge_size=1, in_channels=1, min_pixels=4, max_pixels=64),
)
GRAPH = ModelGraph((VISION, Unit("llm", Role.BACKBONE, Transformer(2, 16, 2, 32))), (("vision", "llm"),))
"""A chain of 3 + 4 layers."""


def stage(first: int, last: int, *, node: int = 0, gpus: int = 1) -> TemplateStage:
    return TemplateStage(first, last, gpus, node, 0.01, 0.02)


def templates(*stages: tuple[TemplateStage, ...], num_nodes: int, fault_tolerance: int, gpus: int = 1) -> TemplateSet:
    """Return a set whose smallest template is used at first."""
    least = 1 + max(each.node for each in stages[0])
    made = tuple(PipelineTemplate(least + index, 4, 0.1, each) for index, each in enumerate(stages))
    instances = tuple(Instance(least, 8 // (num_nodes // least)) for _ in range(num_nodes // least))
    chain = (ChainUnit("vision", 3), ChainUnit("llm", 4))
    return TemplateSet(num_nodes, gpus, fault_tolerance, 1, 8, None, chain, (1000,) * 7, instances, made)


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


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(PlanError, match="1 nodes are left, but 2 replicas of 1 nodes need 2; wait for nodes to return"):
        plan_nodes(ONE_NODE, (2,), graph=GRAPH, before=(Pipeline((2,), 8),), holding=(2,))
