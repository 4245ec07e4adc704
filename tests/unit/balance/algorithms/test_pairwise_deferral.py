from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.algorithms.pairwise_deferral import SubsetSums, defer_pairwise, order_pairs


def loads_after(llm, microbatches, deferral):
    loads = [float(sum(llm[sample] for sample in members)) for members in microbatches]
    home = {sample: index for index, members in enumerate(microbatches) for sample in members}
    for sample, target in deferral.deferred:
        loads[home[sample]] -= llm[sample]
        loads[target] += llm[sample]
    return loads


def test_pairs_share_their_load_and_run_one_after_the_other():
    llm = [5.0, 3.0, 1.0, 1.0, 8.0, 2.0, 2.0, 2.0]
    deferral = defer_pairwise(llm, microbatches=[[0, 1], [2, 3], [4, 5], [6, 7]], max_subset_sums=16)
    assert deferral.pairs == [[2, 3], [0, 1]]
    assert sorted(deferral.deferred) == [(1, 1), (5, 3)]
    assert loads_after(llm, [[0, 1], [2, 3], [4, 5], [6, 7]], deferral) == [5.0, 5.0, 8.0, 6.0]


def least_largest_load(llm, microbatches):
    """The paper's optimum: over every pairing of the upper with the lower half, and every set of samples to defer."""
    loads = [sum(llm[sample] for sample in members) for members in microbatches]
    by_load = sorted(range(len(loads)), key=lambda each: (-loads[each], each))
    upper, lower = by_load[: len(loads) // 2], by_load[len(loads) // 2 :]

    def best_pair(i, j):
        moved = (
            sum(llm[s] for s in chosen)
            for size in range(len(microbatches[i]) + 1)
            for chosen in combinations(microbatches[i], size)
        )
        return min(max(loads[i] - amount, loads[j] + amount) for amount in moved)

    return min(
        max(
            [best_pair(i, j) for i, j in zip(upper, partners, strict=False)]
            + [loads[j] for j in lower if j not in partners[: len(upper)]]
        )
        for partners in permutations(lower)
    )


GROUPS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=2, max_size=6)


@given(groups=GROUPS)
def test_the_largest_load_is_the_least_that_pairs_allow(groups):
    llm = [float(load) for members in groups for load in members]
    ends = [sum(map(len, groups[: index + 1])) for index in range(len(groups))]
    microbatches = [list(range(end - len(members), end)) for members, end in zip(groups, ends, strict=True)]
    deferral = defer_pairwise(llm, microbatches=microbatches, max_subset_sums=64)
    assert sorted(microbatch for pair in deferral.pairs for microbatch in pair) == list(range(len(groups)))
    after = loads_after(llm, microbatches, deferral)
    if len(groups) % 2 == 0:
        assert max(after) == least_largest_load(llm, microbatches)
    home = {sample: index for index, members in enumerate(microbatches) for sample in members}
    assert all([home[sample], target] in deferral.pairs for sample, target in deferral.deferred)
    before = [sum(llm[sample] for sample in members) for members in microbatches]
    assert sum(load * load for load in after) <= sum(load * load for load in before)


@given(work=st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_work_rises_to_a_peak_and_falls(work):
    order = order_pairs([[index] for index in range(len(work))], work=work)
    assert sorted(order) == list(range(len(work)))
    along = [work[index] for index in order]
    peak = along.index(max(along))
    assert along[: peak + 1] == sorted(along[: peak + 1]) and along[peak:] == sorted(along[peak:], reverse=True)


def closest_by_brute_force(loads, target, limit):
    sums = {sum(subset) for size in range(len(loads) + 1) for subset in combinations(loads, size)}
    return min((total for total in sums if total <= limit), key=lambda total: (abs(target - total), total))


SHARES = st.one_of(st.just(1.0), st.floats(0, 1))


@given(loads=st.lists(st.integers(1, 60), max_size=8), share=SHARES, target_share=SHARES)
def test_few_loads_are_searched_exactly(loads, share, target_share):
    limit = float(sum(loads)) * share
    sums = SubsetSums([float(load) for load in loads], limit=limit, max_sums=256)
    target = limit * target_share
    subset = sums.closest(target)
    assert sums.sum_of(subset) == closest_by_brute_force(loads, target, limit)
    assert sum(loads[item] for item in sums.items_of(subset)) == sums.sum_of(subset)


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
