import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.unlike_replicas import share_microbatches
from multimodal.values.errors import AssignmentError
from multimodal.values.length_arrays import LengthBatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.plan.planners.planning_cases import THREE, TWO, TWO_ENCODERS, random_lengths

WHOLE = [name for name, row in BALANCERS.items() if row.keeps_samples_whole and not row.needs_costs]


def build_plan(graph: ModelGraph, num_replicas: int, shares: tuple[int, ...] = ()) -> Plan:
    """Every unit on a rank for each of its replicas."""

    def replicas(unit: str) -> tuple[Replica, ...]:
        return tuple(Replica((Stage((rank,), ((0, len(graph.unit(unit).layers)),)),)) for rank in range(num_replicas))

    llm = graph.backbone.name
    return Plan({name: UnitPlan(replicas(name), microbatch_shares=shares if name == llm else ()) for name in graph.unit_names})


@pytest.mark.parametrize("graph", [TWO, THREE, TWO_ENCODERS])
@pytest.mark.parametrize("name", WHOLE)
def test_every_sample_is_placed_once_with_its_items(graph, name):
    lengths = random_lengths(graph, count=40)
    found = BALANCERS[name](lengths, graph=graph, plan=build_plan(graph, 3, (5, 3, 2)), options=BalanceOptions())
    backbone = graph.backbone.name
    replica_of = {atom.sample_id: replica for replica, own in enumerate(found.units[backbone]) for each in own for atom in each}
    assert sorted(replica_of) == [sample.sample_id for sample in lengths]
    assert [len(own) for own in found.units[backbone]] == [20, 12, 8]
    for unit in graph.encoders:
        placed = [
            (atom.sample_id, replica) for replica, own in enumerate(found.units[unit.name]) for each in own for atom in each
        ]
        items = sum(item.unit == unit.name for sample in lengths for item in sample.items)
        assert len(placed) == items and all(replica_of[sample] == replica for sample, replica in placed)


def test_work_goes_with_the_shares():
    lengths = random_lengths(TWO, count=400)
    balancer = next(BALANCERS[name] for name in WHOLE if name != "none")
    options = BalanceOptions(num_microbatches=20)
    found = balancer(lengths, graph=TWO, plan=build_plan(TWO, 3, (30, 20, 10)), options=options)
    assert [len(own) for own in found.units["llm"]] == [30, 20, 10]
    work = BatchWork(TWO, LengthBatch.of(lengths), options)
    flops = dict(zip(work.arrays.sample_ids.tolist(), work.whole_sample_flops().tolist(), strict=True))
    loads = [sum(flops[atom.sample_id] for each in own for atom in each) for own in found.units["llm"]]
    for load, share in zip(loads, (30, 20, 10), strict=True):
        assert load / sum(loads) == pytest.approx(share / 60, rel=0.01)


def test_replicas_that_differ_share_by_their_ranks():
    """An LLM of one rank, and of three in two stages; encoders on two others of their own take what comes, one after another."""
    num_layers = len(TWO.unit("llm").layers)
    deep = Replica((Stage((1, 2), ((0, 2),), 2), Stage((3, 4), ((2, num_layers),), 2)))
    llm = UnitPlan((Replica((Stage((0,), ((0, num_layers),)),)), deep))
    vision = UnitPlan(tuple(Replica((Stage((rank,), ((0, len(TWO.unit("vision").layers)),)),)) for rank in (5, 6, 7)))
    lengths = random_lengths(TWO, count=20)
    found = BALANCERS["none"](lengths, graph=TWO, plan=Plan({"vision": vision, "llm": llm}), options=BalanceOptions())
    assert [len(own) for own in found.units["llm"]] == [4, 16]
    counts = [len(own) for own in found.units["vision"]]
    assert max(counts) - min(counts) <= 1


@given(count=st.integers(0, 100), shares=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_microbatches_are_dealt_in_proportion(count: int, shares: list[int]):
    counts = share_microbatches(count, shares)
    assert sum(counts) == count and min(counts) >= (count >= len(shares))
    quotas = [count * share / sum(shares) for share in shares]
    if min(quotas) >= 1:
        assert all(abs(found - quota) < 1 for found, quota in zip(counts, quotas, strict=True))


def test_what_cannot_be_placed_is_refused():
    other = next(row for row in BALANCERS.values() if not row.keeps_samples_whole)
    with pytest.raises(AssignmentError, match="keeps samples whole"):
        other(random_lengths(TWO, count=4), graph=TWO, plan=build_plan(TWO, 2, (1, 2)), options=BalanceOptions())
