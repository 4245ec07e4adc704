import pytest

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.measure_balance import NodeTraffic, measure_traffic, moved_volume
from multimodal.balance.unit_cost import CostForm, UnitCost
from multimodal.values.assignment import Assignment, Atom

TOKENS = {"llm": UnitCost(), "vision": UnitCost(CostForm.PADDED)}


def llm(*replicas):
    return tuple(tuple(tuple(Atom(sample) for sample in microbatch) for microbatch in replica) for replica in replicas)


def test_the_costliest_is_held_against_the_mean(graph, build_sample):
    lengths = [build_sample(index, tokens) for index, tokens in enumerate((10, 20, 30, 60))]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=TOKENS))
    found = unit_imbalance(Assignment({"llm": llm([[0, 1], [2]], [[3]])}), work, unit="llm")
    assert found == Imbalance(replica=1.0, microbatch=1.5, microbatch_std=pytest.approx(200**0.5 / 40))


def test_an_idle_replica_counts_and_a_unit_without_work_is_balanced(graph, build_sample):
    work = BatchWork(graph, [build_sample(0, 10)], BalanceOptions(unit_costs=TOKENS))
    placed = Assignment({"llm": llm([[0]], []), "vision": ((), ())})
    assert unit_imbalance(placed, work, unit="llm").replica == 2.0
    assert unit_imbalance(placed, work, unit="vision") == Imbalance(1.0, 1.0, 0.0)


def test_a_padded_microbatch_costs_its_longest_item_each(graph, build_sample):
    work = BatchWork(
        graph, [build_sample(0, 1, ("vision", 4), ("vision", 16), ("vision", 16))], BalanceOptions(unit_costs=TOKENS)
    )
    items = [Atom(0, index) for index in range(3)]
    placed = Assignment({"vision": (((items[0], items[1]),), ((items[2],),))})
    assert unit_imbalance(placed, work, unit="vision").replica == pytest.approx(32 / 24)


def test_traffic_counts_what_other_nodes_loaded(graph, build_sample):
    lengths = [build_sample(index, 10) for index in range(4)]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=TOKENS))
    loaded = Assignment({"llm": llm([[0]], [[1]], [[2]], [[3]])})
    swapped = Assignment({"llm": llm([[2]], [[3]], [[0]], [[1]])})
    volume = moved_volume(loaded, swapped, work, unit="llm", bytes_per_token=4)
    assert volume.toarray().tolist() == [[0, 0, 40, 0], [0, 0, 0, 40], [40, 0, 0, 0], [0, 40, 0, 0]]
    assert measure_traffic(volume, ranks_per_node=2) == NodeTraffic(before=40, after=0)
