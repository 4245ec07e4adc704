from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.pairwise_deferral import defer_pairwise


def loads_after(llm, microbatches, deferral):
    loads = [float(sum(llm[sample] for sample in members)) for members in microbatches]
    home = {sample: index for index, members in enumerate(microbatches) for sample in members}
    for sample, target in deferral.deferred:
        loads[home[sample]] -= llm[sample]
        loads[target] += llm[sample]
    return loads


def test_a_microbatch_alone_stays_as_it_is():
    deferral = defer_pairwise([3.0, 4.0], microbatches=[[0, 1]], max_subset_sums=16)
    assert (deferral.pairs, deferral.deferred) == ([[0]], [])


def test_pairs_share_their_load_and_run_one_after_the_other():
    llm = [5.0, 3.0, 1.0, 1.0, 8.0, 2.0, 2.0, 2.0]
    deferral = defer_pairwise(llm, microbatches=[[0, 1], [2, 3], [4, 5], [6, 7]], max_subset_sums=16)
    assert deferral.pairs == [[2, 3], [0, 1]]
    assert sorted(deferral.deferred) == [(1, 1), (5, 3)]
    assert loads_after(llm, [[0, 1], [2, 3], [4, 5], [6, 7]], deferral) == [5.0, 5.0, 8.0, 6.0]


def test_of_an_odd_number_one_has_no_partner():
    deferral = defer_pairwise([9.0, 1.0, 5.0], microbatches=[[0], [1], [2]], max_subset_sums=16)
    assert (deferral.pairs, deferral.deferred) == ([[0, 2], [1]], [])


def test_without_llm_work_nothing_moves():
    deferral = defer_pairwise([0.0] * 4, microbatches=[[0], [1], [2], [3]], max_subset_sums=16)
    assert (deferral.pairs, deferral.deferred) == ([[0, 2], [1, 3]], [])


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
