from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.subset_sums import SubsetSums


def closest_by_brute_force(loads, target, limit):
    sums = {sum(subset) for size in range(len(loads) + 1) for subset in combinations(loads, size)}
    return min((total for total in sums if total <= limit), key=lambda total: (abs(target - total), total))


def test_the_subset_closest_to_the_target_is_found():
    sums = SubsetSums([7.0, 5.0, 3.0], limit=15.0, max_sums=8)
    subset = sums.closest(8.2)
    assert (sums.sum_of(subset), sums.items_of(subset)) == (8.0, [2, 1])


def test_of_two_that_are_equally_close_the_smaller_is_taken():
    sums = SubsetSums([4.0, 2.0], limit=6.0, max_sums=8)
    assert sums.sum_of(sums.closest(3.0)) == 2.0
    assert sums.sum_of(sums.closest(1.0)) == 0.0


def test_sums_beyond_the_limit_are_no_candidates():
    sums = SubsetSums([4.0, 2.0], limit=3.0, max_sums=8)
    assert sums.sum_of(sums.closest(100.0)) == 2.0


@given(loads=st.lists(st.integers(1, 60), max_size=8), share=st.floats(0, 1), target_share=st.floats(0, 1))
def test_few_loads_are_searched_exactly(loads, share, target_share):
    limit = float(sum(loads)) * share
    sums = SubsetSums([float(load) for load in loads], limit=limit, max_sums=256)
    target = limit * target_share
    subset = sums.closest(target)
    assert sums.sum_of(subset) == closest_by_brute_force(loads, target, limit)
    assert sum(loads[item] for item in sums.items_of(subset)) == sums.sum_of(subset)


@given(loads=st.lists(st.integers(1, 20), min_size=10, max_size=30), target_share=st.floats(0, 1))
def test_small_integers_are_searched_exactly(loads, target_share):
    limit = float(min(sum(loads), 255))
    sums = SubsetSums([float(load) for load in sorted(loads, reverse=True)], limit=limit, max_sums=256)
    target = limit * target_share
    reachable = {0}
    for load in loads:
        reachable |= {total + load for total in reachable if total + load <= limit}
    assert abs(sums.sum_of(sums.closest(target)) - target) == min(abs(total - target) for total in reachable)


@settings(max_examples=30)
@given(loads=st.lists(st.floats(1, 1000), min_size=12, max_size=16), target_share=st.floats(0, 1))
def test_many_loads_miss_the_target_by_little_more_than_they_must(loads, target_share):
    ordered = sorted(loads, reverse=True)
    limit = sum(loads)
    fine = SubsetSums(ordered, limit=limit, max_sums=1024)
    coarse = SubsetSums(ordered, limit=limit, max_sums=64)
    target = limit * target_share

    def miss(sums):
        return abs(sums.sum_of(sums.closest(target)) - target)

    assert miss(coarse) <= miss(fine) + len(loads) * limit / 64
