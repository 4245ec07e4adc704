import pytest

from multimodal.plan.colocated import plan_colocated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit

SHAPE = Transformer(num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
GRAPH = ModelGraph((Unit("vision", Role.ENCODER, SHAPE), Unit("llm", Role.BACKBONE, SHAPE)), (("vision", "llm"),))


@pytest.mark.parametrize("world_size", [1, 2, 4, 5, 8])
def test_without_sizes_every_rank_holds_a_replica_of_every_unit(world_size: int) -> None:
    plan = plan_colocated(GRAPH, sizes={}, world_size=world_size)
    for unit in plan.units.values():
        assert [replica.ranks for replica in unit.replicas] == [(rank,) for rank in range(world_size)]


def test_units_divide_the_same_ranks_differently() -> None:
    sizes = {"vision": UnitSizes(tensor_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=4)}
    plan = plan_colocated(GRAPH, sizes=sizes, world_size=8)
    assert [replica.ranks for replica in plan.units["vision"].replicas] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [replica.ranks for replica in plan.units["llm"].replicas] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_matching_data_parallel_size_may_be_given() -> None:
    assert plan_colocated(GRAPH, sizes={"llm": UnitSizes(2, 1, 1, 2)}, world_size=4).units["llm"].data_parallel_size == 2


def test_another_data_parallel_size_is_an_error() -> None:
    with pytest.raises(
        PlanError, match=r"'vision' .*colocated on 4 ranks.*dp 4 / 1 = 4, not 2; leave --vision-data-parallel-size out"
    ):
        plan_colocated(GRAPH, sizes={"vision": UnitSizes(data_parallel_size=2)}, world_size=4)


def test_a_replica_that_does_not_divide_the_ranks() -> None:
    with pytest.raises(
        PlanError, match=r"'llm' \(tp 1 x pp 3 x dp \?\).*3 ranks, which does not divide 5.*launch 3 or 6 processes"
    ):
        plan_colocated(GRAPH, sizes={"llm": UnitSizes(pipeline_parallel_size=3)}, world_size=5)


def test_a_replica_larger_than_the_run() -> None:
    with pytest.raises(PlanError, match=r"'llm' .*colocated on 1 rank: a replica takes 2 ranks; launch 2 processes"):
        plan_colocated(GRAPH, sizes={"llm": UnitSizes(2)}, world_size=1)


def test_an_unknown_unit() -> None:
    with pytest.raises(PlanError, match="unit 'audio'"):
        plan_colocated(GRAPH, sizes={"audio": UnitSizes()}, world_size=2)
