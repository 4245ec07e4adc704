import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.checks.validate_plan import validate_plan
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan

SHAPE = Transformer(num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
VISION, AUDIO = (Unit(name, Role.ENCODER, SHAPE) for name in ("vision", "audio"))
LLM = Unit("llm", Role.BACKBONE, SHAPE)
TEXT_ONLY = ModelGraph((LLM,))
TWO = ModelGraph((VISION, LLM), (("vision", "llm"),))
THREE = ModelGraph((VISION, AUDIO, LLM), (("vision", "llm"), ("audio", "llm")))


def stage_ranks(plan: Plan, unit: str) -> list[list[tuple[int, ...]]]:
    return [[stage.ranks for stage in replica.stages] for replica in plan.units[unit].replicas]


def test_one_rank_holds_a_text_only_model() -> None:
    plan = plan_disaggregated(TEXT_ONLY, sizes={}, world_size=1)
    assert stage_ranks(plan, "llm") == [[(0,)]]
    assert plan.units["llm"].replicas[0].stages[0].layer_ranges == ((0, 6),)


def test_two_ranks_hold_one_unit_each() -> None:
    plan = plan_disaggregated(TWO, sizes={"vision": UnitSizes(data_parallel_size=1)}, world_size=2)
    assert stage_ranks(plan, "vision") == [[(0,)]]
    assert stage_ranks(plan, "llm") == [[(1,)]]


def test_the_open_data_parallel_size_follows_whichever_unit_leaves_it_open() -> None:
    sizes = {"vision": UnitSizes(), "llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=1)}
    assert plan_disaggregated(TWO, sizes=sizes, world_size=5).units["vision"].data_parallel_size == 3


def test_five_ranks_with_two_encoder_replicas_and_three_stages() -> None:
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=3)}
    plan = plan_disaggregated(TWO, sizes=sizes, world_size=5)
    assert stage_ranks(plan, "vision") == [[(0,)], [(1,)]]
    assert stage_ranks(plan, "llm") == [[(2,), (3,), (4,)]]
    assert [stage.layer_ranges for stage in plan.units["llm"].replicas[0].stages] == [((0, 3),), ((3, 4),), ((4, 6),)]


def test_ranks_are_in_megatrons_order() -> None:
    sizes = {"llm": UnitSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)}
    plan = plan_disaggregated(TEXT_ONLY, sizes=sizes, world_size=8)
    assert stage_ranks(plan, "llm") == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def test_encoders_come_first_in_the_graphs_order() -> None:
    sizes = {"llm": UnitSizes(), "audio": UnitSizes(2, data_parallel_size=1), "vision": UnitSizes(data_parallel_size=1)}
    plan = plan_disaggregated(THREE, sizes=sizes, world_size=4)
    assert [plan.units[name].ranks for name in ("vision", "audio", "llm")] == [(0,), (1, 2), (3,)]


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


def test_sizes_that_do_not_add_up_show_the_arithmetic() -> None:
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(1, 3, 1, 1)}
    with pytest.raises(PlanError) as problem:
        plan_disaggregated(TWO, sizes=sizes, world_size=4)
    assert "vision tp 1 x pp 1 x dp 2 = 2 ranks, llm tp 1 x pp 3 x dp 1 = 3 ranks: together 5 ranks" in str(problem.value)
    assert "the run has 4 processes; launch 5" in str(problem.value)


def test_an_open_size_that_does_not_come_out_even_names_the_counts_that_do() -> None:
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=3)}
    with pytest.raises(PlanError, match=r"llm tp 1 x pp 3 x dp \?: of 6 processes .* leave 4 for 'llm'.* 3 ranks.*launch 5 or 8"):
        plan_disaggregated(TWO, sizes=sizes, world_size=6)


def test_the_counts_that_are_named_do_work() -> None:
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=3)}
    assert [plan_disaggregated(TWO, sizes=sizes, world_size=count).num_ranks for count in (5, 8)] == [5, 8]


def test_no_rank_left_for_the_open_unit() -> None:
    with pytest.raises(
        PlanError, match=r"of 2 processes the other units leave 0 for 'llm'.* 1 rank each; launch 3, .*--colocate-units"
    ):
        plan_disaggregated(TWO, sizes={"vision": UnitSizes(data_parallel_size=2)}, world_size=2)


def test_two_open_sizes_name_the_flag_to_give() -> None:
    with pytest.raises(PlanError, match=r"data parallel sizes of vision and llm are left out.*\(4\); give --vision-dp"):
        plan_disaggregated(TWO, sizes={}, world_size=4)


def test_more_stages_than_layers_names_the_unit() -> None:
    with pytest.raises(PlanError, match=r"unit 'llm': 4 transformer layers cannot be cut into 5 .*--llm-pipeline"):
        plan_disaggregated(TEXT_ONLY, sizes={"llm": UnitSizes(pipeline_parallel_size=5)}, world_size=5)


def test_a_tensor_parallel_size_that_divides_no_heads() -> None:
    with pytest.raises(PlanError, match=r"unit 'llm': num_attention_heads 4 is not divisible by tensor parallel size 3"):
        plan_disaggregated(TEXT_ONLY, sizes={"llm": UnitSizes(3)}, world_size=3)


def test_a_tensor_parallel_size_that_does_not_divide_the_projector() -> None:
    narrow = dataclasses.replace(TWO.unit("vision"), projector_hidden_size=7)
    graph = dataclasses.replace(TWO, units=(narrow, *TWO.units[1:]))
    with pytest.raises(PlanError, match=r"unit 'vision': projector_hidden_size 7 is not divisible by tensor parallel size 2"):
        plan_disaggregated(graph, sizes={"vision": UnitSizes(2), "llm": UnitSizes(data_parallel_size=1)}, world_size=3)


def test_an_unknown_unit() -> None:
    with pytest.raises(PlanError, match="unit 'audio'; the model's units are vision, llm"):
        plan_disaggregated(TWO, sizes={"audio": UnitSizes()}, world_size=2)


def test_context_parallel_ranks_stand_between_tensor_parallel_groups() -> None:
    assert str(UnitSizes(2, 1, 2, 1)) == "tp 2 x cp 2 x pp 1 x dp 1"
    llm = plan_disaggregated(TEXT_ONLY, sizes={"llm": UnitSizes(2, 1, 2)}, world_size=8).units["llm"]
    assert [llm.tensor_parallel_groups(replica.stages[0]) for replica in llm.replicas] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert [llm.context_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("position", range(4))
def test_sizes_below_one(position: int) -> None:
    with pytest.raises(PlanError, match="parallel_size must be at least 1, found 0"):
        UnitSizes(*(0 if index == position else 1 for index in range(4)))


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("size", [2**20 + 1, 10**12])
def test_sizes_beyond_any_run(position: int, size: int) -> None:
    with pytest.raises(PlanError, match="parallel_size must be at most 1,048,576, found "):
        UnitSizes(*(size if index == position else 1 for index in range(4)))


def test_sizes_that_need_more_ranks_than_there_are_lay_out_none() -> None:
    largest = UnitSizes(*[2**20] * 4)
    with pytest.raises(PlanError, match="together 1208925819614629174706176 ranks, but the run has 2 processes"):
        plan_disaggregated(TEXT_ONLY, sizes={"llm": largest}, world_size=2)
    with pytest.raises(PlanError, match="a replica takes 1152921504606846976 ranks"):
        plan_colocated(TEXT_ONLY, sizes={"llm": largest}, world_size=2)


def test_layers_with_unlike_seconds_are_cut_where_the_slowest_stage_is_fastest() -> None:
    sizes = {"vision": UnitSizes(pipeline_parallel_size=2, data_parallel_size=1), "llm": UnitSizes(pipeline_parallel_size=2)}
    seconds = {"llm": (0, 3, 3, 3, 3, 6)}
    own, shared = (
        plan_disaggregated(TWO, sizes=sizes, world_size=4, layer_seconds=seconds),
        plan_colocated(TWO, sizes=sizes, world_size=2, layer_seconds=seconds),
    )
    for plan in (own, shared):
        assert [stage.layer_ranges for stage in plan.units["llm"].replicas[0].stages] == [((0, 4),), ((4, 6),)]
        assert [stage.layer_ranges for stage in plan.units["vision"].replicas[0].stages] == [((0, 3),), ((3, 6),)]


def test_a_number_of_layers_that_is_asked_for_wins_over_their_seconds() -> None:
    sizes = {"llm": UnitSizes(pipeline_parallel_size=2, layers_per_virtual_stage=2)}
    plan = plan_disaggregated(TEXT_ONLY, sizes=sizes, world_size=2, layer_seconds={"llm": (0, 3, 3, 3, 3, 6)})
    assert [stage.layer_ranges for stage in plan.units["llm"].replicas[0].stages] == [((0, 3),), ((3, 6),)]


def test_stages_that_would_hardly_be_faster_stay_even() -> None:
    sizes = {"llm": UnitSizes(pipeline_parallel_size=3)}
    for embedding, first in ((0, (0, 3)), (0.01, (0, 3)), (0.1, (0, 2))):
        plan = plan_disaggregated(TEXT_ONLY, sizes=sizes, world_size=3, layer_seconds={"llm": (embedding, 1, 1, 1, 1, 0)})
        assert plan.units["llm"].replicas[0].stages[0].layer_ranges == (first,)
