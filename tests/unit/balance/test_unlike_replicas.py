import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.unlike_replicas import balance_unlike
from multimodal.values.arrays.length_arrays import LengthBatch
from multimodal.values.errors import AssignmentError
from tests.unit.plan.planners.planning_cases import THREE, TWO, TWO_ENCODERS, random_lengths

WHOLE = [name for name, row in BALANCERS.items() if row.keeps_samples_whole and not row.needs_costs]


@pytest.mark.parametrize("graph", [TWO, THREE, TWO_ENCODERS])
@pytest.mark.parametrize("name", WHOLE)
def test_every_sample_is_placed_once_with_its_items(graph, name):
    lengths = random_lengths(graph, count=40)
    shares = (5, 3, 2)
    found = balance_unlike(lengths, graph=graph, shares=shares, balancer=BALANCERS[name], options=BalanceOptions())
    backbone = graph.backbone.name
    replica_of = {atom.sample_id: replica for replica, own in enumerate(found.units[backbone]) for each in own for atom in each}
    assert sorted(replica_of) == [sample.sample_id for sample in lengths]
    assert [len(own) for own in found.units[backbone]] == list(shares)
    for unit in graph.encoders:
        placed = [
            (atom.sample_id, replica) for replica, own in enumerate(found.units[unit.name]) for each in own for atom in each
        ]
        items = sum(item.unit == unit.name for sample in lengths for item in sample.items)
        assert len(placed) == items and all(replica_of[sample] == replica for sample, replica in placed)


def test_work_goes_with_the_shares():
    lengths = random_lengths(TWO, count=400)
    balancer = next(BALANCERS[name] for name in WHOLE if name != "none")
    options = BalanceOptions()
    found = balance_unlike(lengths, graph=TWO, shares=(30, 20, 10), balancer=balancer, options=options)
    work = BatchWork(TWO, LengthBatch.of(lengths), options)
    flops = dict(zip(work.arrays.sample_ids.tolist(), work.whole_sample_flops().tolist(), strict=True))
    loads = [sum(flops[atom.sample_id] for each in own for atom in each) for own in found.units["llm"]]
    for load, share in zip(loads, (30, 20, 10), strict=True):
        assert load / sum(loads) == pytest.approx(share / 60, rel=0.01)


def test_what_cannot_be_placed_is_refused():
    lengths = random_lengths(TWO, count=4)
    other = next(row for row in BALANCERS.values() if not row.keeps_samples_whole)
    with pytest.raises(AssignmentError, match="keeps samples whole"):
        balance_unlike(lengths, graph=TWO, shares=(1, 1), balancer=other, options=BalanceOptions())
    with pytest.raises(AssignmentError, match="at least one microbatch"):
        balance_unlike(lengths, graph=TWO, shares=(1, 0), balancer=BALANCERS[WHOLE[0]], options=BalanceOptions())
