"""Virtual stages from sizes: Megatron's order of layer ranges, or a V."""

from collections.abc import Callable

import pytest

from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

SHAPE = {"num_layers": 8, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
GRAPH = ModelGraph.from_dict({"units": {"low_res": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}})
ENCODER = UnitSizes(data_parallel_size=1)


def layers(plan: Plan, unit: str = "llm") -> list[list[tuple[int, int]]]:
    """Layer ranges, stage by stage."""
    return [list(stage.layer_ranges) for stage in plan.units[unit].replicas[0].stages]


def plan_llm(sizes: UnitSizes, *, world_size: int = 3, is_folded: bool = False) -> Plan:
    return plan_disaggregated(GRAPH, sizes={"low_res": ENCODER, "llm": sizes}, world_size=world_size, is_folded=is_folded)


def test_ranges_are_dealt_in_turn() -> None:
    dealt = plan_llm(UnitSizes(1, 2, virtual_pipeline_size=2))
    assert layers(dealt) == [[(0, 3), (5, 7)], [(3, 5), (7, 10)]]
    assert [stage.ranks for stage in dealt.units["llm"].replicas[0].virtual_stages] == [(1,), (2,), (1,), (2,)]


def test_two_ranges_can_be_folded_and_others_are_dealt_all_the_same() -> None:
    assert layers(plan_llm(UnitSizes(1, 2, virtual_pipeline_size=2), is_folded=True)) == [[(0, 3), (7, 10)], [(3, 5), (5, 7)]]
    assert layers(plan_llm(UnitSizes(1, 2), is_folded=True)) == [[(0, 5)], [(5, 10)]]


def test_ranges_are_as_even_as_the_layers_allow() -> None:
    plan = plan_llm(UnitSizes(1, 2, virtual_pipeline_size=3))
    assert layers(plan) == [[(0, 3), (5, 6), (7, 8)], [(3, 5), (6, 7), (8, 10)]]


def test_layers_of_a_virtual_stage_are_megatron_s_other_way() -> None:
    for each, count in ((1, 4), (2, 2), (4, 1)):
        assert plan_llm(UnitSizes(1, 2, layers_per_virtual_stage=each)) == plan_llm(UnitSizes(1, 2, virtual_pipeline_size=count))


def test_an_encoder_and_every_replica_have_them_too() -> None:
    sizes = {"low_res": UnitSizes(2, 2, virtual_pipeline_size=2), "llm": UnitSizes(1, 4, virtual_pipeline_size=2)}
    plan = plan_colocated(GRAPH, sizes=sizes, world_size=8)
    assert layers(plan, "low_res") == [[(0, 3), (5, 7)], [(3, 5), (7, 10)]]
    assert {tuple(stage.layer_ranges for stage in replica.stages) for replica in plan.units["llm"].replicas} == {
        (((0, 2), (5, 6)), ((2, 3), (6, 7)), ((3, 4), (7, 8)), ((4, 5), (8, 10)))
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            lambda: UnitSizes(1, 2, virtual_pipeline_size=5),
            "unit 'llm': 8 transformer layers cannot be cut into 10 layer ranges, 5 for each of 2 pipeline stages "
            "(--llm-virtual-pipeline-model-parallel-size); use at most 4, or lower --llm-pipeline-model-parallel-size",
        ),
        (
            lambda: UnitSizes(1, 1, virtual_pipeline_size=2),
            "unit 'llm': --llm-virtual-pipeline-model-parallel-size 2 would be ignored: with one pipeline stage there is "
            "nothing to interleave; raise --llm-pipeline-model-parallel-size",
        ),
        (
            lambda: UnitSizes(1, 1, layers_per_virtual_stage=2),
            "--llm-num-layers-per-virtual-pipeline-stage 2 would be ignored: with one pipeline stage",
        ),
        (
            lambda: UnitSizes(1, 2, layers_per_virtual_stage=3),
            "--llm-num-layers-per-virtual-pipeline-stage 3 does not divide its 8 transformer layers over 2 pipeline stages; "
            "choose 1 or 2 or 4, or use --llm-virtual-pipeline-model-parallel-size N",
        ),
        (lambda: UnitSizes(1, 3, layers_per_virtual_stage=1), "3 stages cannot hold equally many, or use"),
        (lambda: UnitSizes(1, 2, virtual_pipeline_size=0), "virtual_pipeline_size must be at least 1, found 0"),
        (lambda: UnitSizes(1, 2, virtual_pipeline_size=2, layers_per_virtual_stage=1), "say the same in two ways; keep one"),
    ],
)
def test_sizes_that_make_no_virtual_stages(sizes: Callable[[], UnitSizes], message: str) -> None:
    with pytest.raises(PlanError) as problem:
        plan_llm(sizes(), world_size=4 if "3 stages" in message else 3)
    assert message in str(problem.value)


def test_flags_of_units_with_underscores_are_spelt_with_dashes() -> None:
    with pytest.raises(PlanError, match="--low-res-virtual-pipeline-model-parallel-size 2 would be ignored"):
        plan_colocated(GRAPH, sizes={"low_res": UnitSizes(virtual_pipeline_size=2)}, world_size=2)
