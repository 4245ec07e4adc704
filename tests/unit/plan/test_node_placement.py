"""Tensor parallel groups lie inside nodes where sizes allow it, and whoever runs is told where they do not."""

import pytest

from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.node_placement import describe_placement, split_units
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

SHAPE = {"num_layers": 4, "num_attention_heads": 12, "hidden_size": 48, "ffn_hidden_size": 96}
IMAGE = {"patch_size": 2, "in_channels": 3, "merge_size": 2}
ENCODER = {"role": "encoder", "image": IMAGE, **SHAPE}
GRAPH = ModelGraph.from_dict({"units": {"vision": ENCODER, "audio": ENCODER, "llm": {"role": "backbone", **SHAPE}}})


def sizes(**units: tuple[int, int]) -> dict[str, UnitSizes]:
    """Sizes (tp, dp) of units."""
    return {name: UnitSizes(tensor_parallel_size=tensor, data_parallel_size=data) for name, (tensor, data) in units.items()}


def first_ranks(plan: Plan) -> dict[str, int]:
    return {name: min(unit.ranks) for name, unit in plan.units.items()}


def lines(plan: Plan, *, is_given: bool = False) -> list[str]:
    return list(describe_placement(GRAPH, plan, ranks_per_node=4, is_given=is_given))


def test_large_groups_come_first_where_nodes_would_split_them() -> None:
    given = sizes(vision=(1, 3), audio=(2, 1), llm=(4, 2))
    plan = plan_disaggregated(GRAPH, sizes=given, world_size=13, ranks_per_node=4)
    assert first_ranks(plan) == {"llm": 0, "audio": 8, "vision": 10}
    assert list(plan.units) == ["vision", "audio", "llm"]
    assert lines(plan) == [
        "ranks go to llm, audio, vision, in this order, so that fewer tensor parallel groups lie across two nodes"
    ]
    on_one_node = plan_disaggregated(GRAPH, sizes=given, world_size=13, ranks_per_node=None)
    assert first_ranks(on_one_node) == {"vision": 0, "audio": 3, "llm": 5}
    assert on_one_node == plan_disaggregated(GRAPH, sizes=given, world_size=13, ranks_per_node=16)


def test_the_order_stays_where_no_group_is_split() -> None:
    given = sizes(vision=(1, 2), audio=(2, 1), llm=(4, 2))
    plan = plan_disaggregated(GRAPH, sizes=given, world_size=12, ranks_per_node=4)
    assert first_ranks(plan) == {"vision": 0, "audio": 2, "llm": 4}
    assert lines(plan) == []


@pytest.mark.parametrize("tensor", [3, 6])
def test_a_size_that_does_not_divide_a_node_is_warned_of(tensor: int) -> None:
    plan = plan_disaggregated(
        GRAPH, sizes=sizes(vision=(1, 1), audio=(1, 1), llm=(tensor, 2)), world_size=2 + 2 * tensor, ranks_per_node=4
    )
    assert list(split_units(plan, ranks_per_node=4)) == ["llm"]
    (line,) = [line for line in lines(plan) if line.startswith("warning")]
    assert "unit 'llm': the tensor parallel group of ranks" in line
    assert line.endswith("use a size that divides a node's ranks")


def test_a_plan_file_is_taken_as_it_is_and_warned_of() -> None:
    plan = plan_disaggregated(GRAPH, sizes=sizes(vision=(1, 1), audio=(2, 1), llm=(4, 1)), world_size=7)
    (line,) = lines(plan, is_given=True)
    assert line.startswith("warning: unit 'llm': the tensor parallel group of ranks 3-6 lies across nodes of 4 ranks")
    assert line.endswith("let the plan's groups begin at multiples of their size")
    shared = plan_colocated(GRAPH, sizes={name: UnitSizes(tensor_parallel_size=4) for name in GRAPH.unit_names}, world_size=8)
    assert lines(shared, is_given=True) == lines(shared) == []
