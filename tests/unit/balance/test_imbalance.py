import pytest

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.measure_balance import NodeTraffic, measure_traffic, moved_volume
from multimodal.values.assignment import Assignment, Atom

TOKENS = {"llm": LengthCost(), "vision": LengthCost(CostForm.PADDED)}


def llm(*replicas):
    return tuple(tuple(tuple(Atom(sample) for sample in microbatch) for microbatch in replica) for replica in replicas)


def test_the_costliest_is_held_against_the_mean(graph, build_sample):
    lengths = [build_sample(index, tokens) for index, tokens in enumerate((10, 20, 30, 60))]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=TOKENS))
    found = unit_imbalance(Assignment({"llm": llm([[0, 1], [2]], [[3]])}), work, unit="llm")
    assert found[:2] == (1.0, 1.5) and found.microbatch_std == pytest.approx(200**0.5 / 40)


def test_one_item_longer_than_the_mean_is_what_no_balancer_can_mend(graph, build_sample):
    lengths = [build_sample(index, tokens) for index, tokens in enumerate((10, 20, 30, 60))]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=TOKENS))
    even = unit_imbalance(Assignment({"llm": llm([[0, 1], [2]], [[3]])}), work, unit="llm")
    assert (even.replica_of_longest, even.microbatch_of_longest) == (1.0, 1.5)
    spread = unit_imbalance(Assignment({"llm": llm([[0, 3]], [[1]], [[2]], [])}), work, unit="llm")
    assert (spread.replica_of_longest, spread.microbatch_of_longest) == (2.0, 1.5)
    assert spread.replica == pytest.approx(70 / 30)


def test_the_longest_is_a_sample_where_samples_stay_whole_and_else_an_item(graph, build_sample):
    lengths = [build_sample(0, 1, ("audio", 40), ("audio", 50)), build_sample(1, 1, ("audio", 30)), build_sample(2, 1)]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs={"audio": LengthCost()}))
    first, second, third = Atom(0, 0), Atom(0, 1), Atom(1, 0)
    whole = unit_imbalance(Assignment({"audio": (((first, second),), ((third,),))}), work, unit="audio")
    assert whole.replica == whole.replica_of_longest == 1.5
    spread = unit_imbalance(Assignment({"audio": (((first,), (third,)), ((second,),))}), work, unit="audio")
    assert (spread.replica, spread.replica_of_longest) == (pytest.approx(70 / 60), 1.0)
    assert spread.microbatch == spread.microbatch_of_longest == 1.25


def test_an_idle_replica_counts_and_a_unit_without_work_is_balanced(graph, build_sample):
    work = BatchWork(graph, [build_sample(0, 10)], BalanceOptions(unit_costs=TOKENS))
    placed = Assignment({"llm": llm([[0]], []), "vision": ((), ())})
    assert unit_imbalance(placed, work, unit="llm")[:4] == (2.0, 1.0, 0.0, 2.0)
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
