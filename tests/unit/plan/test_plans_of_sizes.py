"""Plans from sizes: units on ranks of their own or on all ranks, virtual stages, and groups inside nodes."""

import re
from collections.abc import Callable
from dataclasses import replace

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
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan

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
    """Layer ranges, stage by stage."""
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


def refuse(plan: Callable[..., Plan], graph: ModelGraph, world_size: int, message: str, **sizes: UnitSizes) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan(graph, sizes=sizes, world_size=world_size)


def test_numbers_of_ranks_that_do_not_add_up_are_refused_with_those_that_do() -> None:
    two, three = UnitSizes(data_parallel_size=2), UnitSizes(1, 3)
    arithmetic = "vision tp 1 x pp 1 x dp 2 = 2 ranks, llm tp 1 x pp 3 x dp 1 = 3 ranks: together 5 ranks, but the run has 4 "
    refuse(OWN, TWO, 4, f"{arithmetic}processes; launch 5", vision=two, llm=UnitSizes(1, 3, 1, 1))
    left = "llm tp 1 x pp 3 x dp ?: of 6 processes the other units leave 4 for 'llm', whose replicas take 3 ranks each; launch"
    refuse(OWN, TWO, 6, f"{left} 5 or 8", vision=two, llm=three)
    assert [OWN(TWO, sizes={"vision": two, "llm": three}, world_size=count).num_ranks for count in (5, 8)] == [5, 8]
    refuse(OWN, TWO, 2, "leave 0 for 'llm', whose replicas take 1 rank each; launch 3, ", vision=two)
    refuse(OWN, TWO, 4, "data parallel sizes of vision and llm are left out, but only one can follow from the number of ")
    refuse(OWN, TWO, 4, "(4); give --vision-dp, or let the units share ranks with --colocate-units")
    refuse(SHARED, TWO, 4, "dp 4 / 1 = 4, not 2; leave --vision-data-parallel-size out", vision=two)
    refuse(SHARED, TWO, 5, "takes 3 ranks, which does not divide 5; change its tp, cp or pp, or launch 3 or 6", llm=three)
    refuse(SHARED, TWO, 1, "colocated on 1 rank: a replica takes 2 ranks; launch 2 processes", llm=UnitSizes(2))
    huge = UnitSizes(*[2**20] * 4)
    refuse(OWN, TEXT_ONLY, 2, "together 1208925819614629174706176 ranks, but the run has 2 processes", llm=huge)
    refuse(SHARED, TEXT_ONLY, 2, "a replica takes 1152921504606846976 ranks", llm=huge)


def test_sizes_that_do_not_suit_the_model_are_refused() -> None:
    for plan in (OWN, SHARED):
        refuse(plan, TWO, 2, "unit 'audio'; the model's units are vision, llm", audio=UnitSizes())
    refuse(OWN, TEXT_ONLY, 5, "unit 'llm': 4 transformer layers cannot be cut into 5 ", llm=UnitSizes(1, 5))
    refuse(OWN, TEXT_ONLY, 5, "num_attention_heads 12 is not divisible by tensor parallel size 5", llm=UnitSizes(5))
    narrow, one = replace(TWO, units=(replace(VISION, projector_hidden_size=7), LLM)), UnitSizes(data_parallel_size=1)
    message = "unit 'vision': projector_hidden_size 7 is not divisible by tensor parallel size 2"
    refuse(OWN, narrow, 3, message, vision=UnitSizes(2), llm=one)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (1, 2, 1, 1, 5),
            "unit 'llm': 8 transformer layers cannot be cut into 10 layer ranges, 5 for each of 2 pipeline stages (",
        ),
        ((1, 2, 1, 1, 5), "virtual-pipeline-model-parallel-size); use at most 4, or lower --llm-pipeline-model-parallel-size"),
        ((1, 1, 1, 1, 2), "unit 'llm': --llm-virtual-pipeline-model-parallel-size 2 would be ignored: with one pipeline stage "),
        ((1, 1, 1, 1, 2), "there is nothing to interleave; raise --llm-pipeline-model-parallel-size"),
        ((1, 1, 1, 1, 1, 2), "--llm-num-layers-per-virtual-pipeline-stage 2 would be ignored: with one pipeline stage"),
        (
            (1, 2, 1, 1, 1, 3),
            "stage 3 does not divide its 8 transformer layers over 2 pipeline stages; choose 1 or 2 or 4, or use ",
        ),
        ((1, 3, 1, 1, 1, 1), "3 stages cannot hold equally many, or use --llm-virtual-pipeline-model-parallel-size N"),
    ],
)
def test_sizes_that_make_no_virtual_stages_are_refused(sizes, message) -> None:
    refuse(OWN, LOW_RES, 1 + sizes[1], message, low_res=UnitSizes(data_parallel_size=1), llm=UnitSizes(*sizes))


def test_flags_of_units_with_underscores_are_spelt_with_dashes() -> None:
    message = "--low-res-virtual-pipeline-model-parallel-size 2 would be ignored"
    refuse(SHARED, LOW_RES, 2, message, low_res=UnitSizes(virtual_pipeline_size=2))


@pytest.mark.parametrize("name", UnitSizes.__dataclass_fields__)
def test_sizes_below_one_and_beyond_any_run_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} must be at least 1, found 0"):
        UnitSizes(**{name: 0})
    for size in (2**20 + 1, 10**12):
        with pytest.raises(PlanError, match=f"{name} must be at most 1,048,576, found "):
            UnitSizes(**{name: size})


def test_virtual_stages_are_given_in_one_way() -> None:
    with pytest.raises(PlanError, match="say the same in two ways; keep one"):
        UnitSizes(1, 2, virtual_pipeline_size=2, layers_per_virtual_stage=1)


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
    """Plan units of these sizes (tp, dp)."""
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
