"""Plans from sizes: units on ranks of their own or on all ranks, virtual stages, and groups inside nodes.

`python -m tests.unit.plan.test_plans_of_sizes` writes the answers of tests/golden/sizes.txt anew.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.plan.plans_of_sizes import (
    UnitSizes,
    describe_placement,
    fold_stages,
    plan_colocated,
    plan_disaggregated,
    split_units,
)
from multimodal.values.model_graph import Experts, ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan
from tests.unit.golden_answers import Kinds, differing, write

SHAPE = Transformer(num_layers=4, hidden_size=48, num_attention_heads=12, ffn_hidden_size=96)
VISION, AUDIO = (Unit(name, Role.ENCODER, SHAPE, ImageInput(2, 2)) for name in ("vision", "audio"))
LLM = Unit("llm", Role.BACKBONE, SHAPE)
TEXT_ONLY = ModelGraph((LLM,))
TWO = ModelGraph((VISION, LLM), (("vision", "llm"),))
THREE = ModelGraph((VISION, AUDIO, LLM), (("vision", "llm"), ("audio", "llm")))
DEEP = replace(SHAPE, num_layers=8)
"""Eight layers in each of two units, one with an underscore in its name."""
LOW_RES = ModelGraph((Unit("low_res", Role.ENCODER, DEEP), Unit("llm", Role.BACKBONE, DEEP)), (("low_res", "llm"),))


def ranks(plan: Plan, unit: str) -> list[list[tuple[int, ...]]]:
    return [[stage.ranks for stage in replica.stages] for replica in plan.units[unit].replicas]


def layers(plan: Plan, unit: str = "llm") -> list[list[tuple[int, int]]]:
    return [list(stage.layer_ranges) for stage in plan.units[unit].replicas[0].stages]


def test_units_follow_each_other_in_megatrons_order_and_the_open_size_follows() -> None:
    def ranks_of(graph: ModelGraph, world_size: int, **sizes: UnitSizes) -> list[list[list[tuple[int, ...]]]]:
        plan = plan_disaggregated(graph, sizes=sizes, world_size=world_size)
        return [ranks(plan, unit) for unit in graph.unit_names]

    one, two = (UnitSizes(data_parallel_size=count) for count in (1, 2))
    assert ranks_of(TEXT_ONLY, 1) == [[[(0,)]]]
    assert ranks_of(TWO, 2, vision=one) == [[[(0,)]], [[(1,)]]]
    assert ranks_of(TWO, 5, llm=UnitSizes(1, 2, 1, 1)) == [[[(0,)], [(1,)], [(2,)]], [[(3,), (4,)]]]
    assert ranks_of(TWO, 5, vision=two, llm=UnitSizes(1, 3)) == [[[(0,)], [(1,)]], [[(2,), (3,), (4,)]]]
    assert ranks_of(TEXT_ONLY, 8, llm=UnitSizes(2, 2, 1, 2)) == [[[(0, 1), (4, 5)], [(2, 3), (6, 7)]]]
    assert ranks_of(THREE, 4, llm=UnitSizes(), audio=UnitSizes(2, 1, 1, 1), vision=one) == [[[(0,)]], [[(1, 2)]], [[(3,)]]]


def test_layers_are_divided_evenly() -> None:
    plan = plan_disaggregated(TWO, sizes={"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(1, 3)}, world_size=5)
    assert layers(plan) == [[(0, 3)], [(3, 4)], [(4, 6)]] and layers(plan, "vision") == [[(0, 6)]]


def test_colocated_units_divide_all_ranks_each_in_its_own_way() -> None:
    plan = plan_colocated(TWO, sizes={}, world_size=5)
    assert ranks(plan, "vision") == ranks(plan, "llm") == [[(rank,)] for rank in range(5)]
    plan = plan_colocated(TWO, sizes={"vision": UnitSizes(2), "llm": UnitSizes(1, 4, data_parallel_size=2)}, world_size=8)
    assert ranks(plan, "vision") == [[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]]
    assert ranks(plan, "llm") == [[(0,), (2,), (4,), (6,)], [(1,), (3,), (5,), (7,)]]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 3)), min_size=3, max_size=3), st.integers(0, 3)
)
def test_every_grid_is_valid_and_the_same_with_one_size_left_open(grids: list[tuple[int, int, int]], opened: int) -> None:
    sizes = {name: UnitSizes(tp, pp, 1, dp) for name, (tp, pp, dp) in zip(THREE.unit_names, grids, strict=True)}
    world_size = sum(tp * pp * dp for tp, pp, dp in grids)
    plan = plan_disaggregated(THREE, sizes=sizes, world_size=world_size)
    validate_plan(plan, graph=THREE, world_size=world_size)
    assert sorted(rank for unit in plan.units.values() for rank in unit.ranks) == list(range(world_size))
    if opened < 3:
        name = THREE.unit_names[opened]
        tp, pp, _ = grids[opened]
        assert plan_disaggregated(THREE, sizes={**sizes, name: UnitSizes(tp, pp)}, world_size=world_size) == plan


def test_context_parallel_ranks_stand_between_tensor_parallel_groups() -> None:
    assert str(UnitSizes(2, 1, 2, 1)) == "tp 2 x cp 2 x pp 1 x dp 1"
    llm = plan_disaggregated(TEXT_ONLY, sizes={"llm": UnitSizes(2, 1, 2)}, world_size=8).units["llm"]
    assert [llm.tensor_parallel_groups(replica.stages[0]) for replica in llm.replicas] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert [llm.context_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2


OWN, SHARED = plan_disaggregated, plan_colocated
NARROW = replace(TWO, units=(replace(VISION, projector_hidden_size=7), LLM))


def with_experts(**experts: int) -> ModelGraph:
    return ModelGraph((replace(LLM, transformer=replace(SHAPE, experts=Experts(**experts))),))


def kind(graph: ModelGraph, **document: Any) -> tuple[Any, Callable[[Any], object]]:
    """Plan units of these sizes on so many ranks, of their own or shared."""

    def read(given: dict[str, Any]) -> None:
        sizes = {name: UnitSizes(**each) for name, each in given.items() if name not in ("ranks", "shared")}
        (SHARED if given["shared"] else OWN)(graph, sizes=sizes, world_size=given["ranks"])

    return {"shared": False, **document}, read


SIZES_KINDS: Kinds = {
    "llm": kind(TEXT_ONLY, ranks=4),
    "vision, llm": kind(TWO, ranks=4, shared=True),
    "low_res, llm of 8 layers": kind(LOW_RES, ranks=4, low_res={"data_parallel_size": 1}),
    "vision with a projector of 7, llm": kind(NARROW, ranks=4, shared=True),
    "llm with experts": kind(with_experts(num_experts=8), ranks=6, shared=True),
    "llm with narrow experts": kind(with_experts(num_experts=8, ffn_hidden_size=9), ranks=4, shared=True),
    "llm with a narrow shared expert": kind(with_experts(num_experts=8, shared_expert_intermediate_size=5), ranks=4, shared=True),
}


def test_every_size_is_answered_as_written() -> None:
    assert differing("sizes.txt", SIZES_KINDS) == []


def test_numbers_of_ranks_that_are_named_are_enough() -> None:
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(1, 3)}
    assert [OWN(TWO, sizes=sizes, world_size=count).num_ranks for count in (5, 8)] == [5, 8], "5 or 8, as sizes.txt says"


def test_layers_with_unlike_seconds_are_cut_where_the_slowest_stage_is_fastest() -> None:
    sizes = {"vision": UnitSizes(1, 2, 1, 1), "llm": UnitSizes(1, 2)}
    for plan, world_size in ((OWN, 4), (SHARED, 2)):
        found = plan(TWO, sizes=sizes, world_size=world_size, layer_seconds={"llm": (0, 3, 3, 3, 3, 6)})
        assert layers(found) == [[(0, 4)], [(4, 6)]] and layers(found, "vision") == [[(0, 3)], [(3, 6)]]


@pytest.mark.parametrize(
    ("sizes", "seconds", "first"),
    [
        (UnitSizes(1, 2, layers_per_virtual_stage=2), (0, 3, 3, 3, 3, 6), (0, 3)),  # layers that are asked for win
        (UnitSizes(1, 3), (0, 1, 1, 1, 1, 0), (0, 3)),
        (UnitSizes(1, 3), (0.01, 1, 1, 1, 1, 0), (0, 3)),  # hardly faster
        (UnitSizes(1, 3), (0.1, 1, 1, 1, 1, 0), (0, 2)),
    ],
)
def test_stages_stay_even_where_that_is_asked_for_or_little_is_gained(sizes, seconds, first) -> None:
    plan = OWN(TEXT_ONLY, sizes={"llm": sizes}, world_size=sizes.ranks_per_replica, layer_seconds={"llm": seconds})
    assert layers(plan)[0] == [first]


def plan_llm(sizes: UnitSizes) -> Plan:
    return OWN(LOW_RES, sizes={"low_res": UnitSizes(data_parallel_size=1), "llm": sizes}, world_size=3)


def test_ranges_are_dealt_in_turn_or_two_of_them_folded() -> None:
    dealt = plan_llm(UnitSizes(1, 2, virtual_pipeline_size=2))
    assert layers(dealt) == [[(0, 3), (5, 7)], [(3, 5), (7, 10)]]
    assert [stage.ranks for stage in dealt.units["llm"].replicas[0].virtual_stages] == [(1,), (2,), (1,), (2,)]
    folded = fold_stages(dealt)
    assert layers(folded) == [[(0, 3), (7, 10)], [(3, 5), (5, 7)]] and fold_stages(folded) == folded
    assert ranks(folded, "llm") == ranks(dealt, "llm")
    assert layers(fold_stages(plan_llm(UnitSizes(1, 2)))) == [[(0, 5)], [(5, 10)]]
    uneven = plan_llm(UnitSizes(1, 2, virtual_pipeline_size=3))
    assert layers(uneven) == [[(0, 3), (5, 6), (7, 8)], [(3, 5), (6, 7), (8, 10)]]
    for each, count in ((1, 4), (2, 2), (4, 1)):
        assert plan_llm(UnitSizes(1, 2, layers_per_virtual_stage=each)) == plan_llm(UnitSizes(1, 2, virtual_pipeline_size=count))


def test_an_encoder_and_every_replica_have_virtual_stages_too() -> None:
    sizes = {"low_res": UnitSizes(2, 2, virtual_pipeline_size=2), "llm": UnitSizes(1, 4, virtual_pipeline_size=2)}
    plan = plan_colocated(LOW_RES, sizes=sizes, world_size=8)
    assert layers(plan, "low_res") == [[(0, 3), (5, 7)], [(3, 5), (7, 10)]]
    assert {tuple(stage.layer_ranges for stage in replica.stages) for replica in plan.units["llm"].replicas} == {
        (((0, 2), (5, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8)), ((4, 5), (8, 10)))
    }


def place(world_size: int, *, ranks_per_node: int | None = 4, **units: tuple[int, int]) -> Plan:
    sizes = {name: UnitSizes(tensor, data_parallel_size=data) for name, (tensor, data) in units.items()}
    return plan_disaggregated(THREE, sizes=sizes, world_size=world_size, ranks_per_node=ranks_per_node)


def first_ranks(plan: Plan) -> dict[str, int]:
    return {name: min(unit.ranks) for name, unit in plan.units.items()}


def lines(plan: Plan, *, is_given: bool = False) -> list[str]:
    return list(describe_placement(THREE, plan, ranks_per_node=4, is_given=is_given))


def test_large_groups_come_first_where_nodes_would_split_them() -> None:
    given = {"vision": (1, 3), "audio": (2, 1), "llm": (4, 2)}
    plan, on_one_node = place(13, **given), place(13, ranks_per_node=None, **given)
    assert first_ranks(plan) == {"llm": 0, "audio": 8, "vision": 10} and tuple(plan.units) == THREE.unit_names
    assert lines(plan) == [
        "ranks go to llm, audio, vision, in this order, so that fewer tensor parallel groups lie across two nodes"
    ]
    assert lines(plan, is_given=True) == [], "as the file says"
    assert first_ranks(on_one_node) == {"vision": 0, "audio": 3, "llm": 5} and on_one_node == place(
        13, ranks_per_node=16, **given
    )
    whole = place(12, vision=(1, 2), audio=(2, 1), llm=(4, 2))
    assert first_ranks(whole) == {"vision": 0, "audio": 2, "llm": 4} and lines(whole) == []


@pytest.mark.parametrize("tensor", [3, 6])
def test_a_size_that_does_not_divide_a_node_is_warned_of(tensor: int) -> None:
    plan = place(2 + 2 * tensor, vision=(1, 1), audio=(1, 1), llm=(tensor, 2))
    assert list(split_units(plan, ranks_per_node=4)) == ["llm"]
    (line,) = [line for line in lines(plan) if line.startswith("warning")]
    assert f"unit 'llm': the tensor parallel group of ranks 2-{1 + tensor} lies" in line, "the first one"
    assert line.endswith("use a size that divides a node's ranks")


def test_a_plan_file_is_taken_as_it_is_and_warned_of() -> None:
    (line,) = lines(place(7, ranks_per_node=None, vision=(1, 1), audio=(2, 1), llm=(4, 1)), is_given=True)
    assert line.startswith("warning: unit 'llm': the tensor parallel group of ranks 3-6 lies across nodes of 4 ranks")
    assert line.endswith("let the plan's groups begin at multiples of their size")
    shared = plan_colocated(THREE, sizes=dict.fromkeys(THREE.unit_names, UnitSizes(4)), world_size=8)
    assert lines(shared, is_given=True) == lines(shared) == []


if __name__ == "__main__":
    write("sizes.txt", SIZES_KINDS)
