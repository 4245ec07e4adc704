"""Entrain's assignment, and the pairwise deferral and bottleneck matching in it."""

from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.algorithms.pairwise_deferral import (
    defer_pairwise,
    least_bottleneck,
    match_bottleneck,
    order_pairs,
)
from tests.unit.without_kernels import without_kernels

LOAD = st.one_of(st.integers(0, 20), st.floats(0, 1e6), st.just(0), st.floats(0, 1e300))


@st.composite
def batches(draw):
    num_samples = draw(st.integers(1, 40))
    row = st.lists(LOAD, min_size=num_samples, max_size=num_samples)
    encoders = draw(st.lists(row, max_size=3))
    return {
        "llm_loads": draw(row),
        "encoder_loads": np.array(encoders, dtype=float).reshape(len(encoders), num_samples),
        "num_replicas": draw(st.integers(1, min(4, num_samples))),
        "num_microbatches": draw(st.integers(1, 12)),
        "min_num_microbatches": draw(st.one_of(st.none(), st.integers(1, 6))),
    }


@given(batch=batches())
def test_a_replicas_microbatches_are_those_of_the_reference(batch):
    alone = {**batch, "num_replicas": 1}
    assert assign_entrain(**alone) == without_kernels(assign_entrain)(**alone)


def grouped(replicas, encoded, run, counts) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The encoder and the LLM microbatches of every replica."""
    groups = [([[] for _ in range(count)], [[] for _ in range(count)]) for count in counts]
    for sample, (replica, *microbatches) in enumerate(zip(replicas, encoded, run, strict=True)):
        for own, microbatch in zip(groups[replica], microbatches, strict=True):
            own[microbatch].append(sample)
    return groups


@pytest.mark.parametrize("assign", [assign_entrain, without_kernels(assign_entrain)])
@settings(max_examples=50)
@given(batch=batches())
def test_every_sample_is_encoded_once_and_in_the_llm_at_once_or_one_microbatch_later(assign, batch):
    replicas, encoded, run, counts = assign(**batch)
    assert set(replicas) == set(range(batch["num_replicas"]))
    assert len(counts) == batch["num_replicas"] and len(replicas) == len(encoded) == len(run) == len(batch["llm_loads"])
    assert set(np.subtract(run, encoded).tolist()) <= {0, 1}
    for of_encoder, of_llm in grouped(replicas, encoded, run, counts):
        assert all(of_encoder) or not np.any(batch["encoder_loads"])
        assert all(of_llm) and len(of_llm) <= batch["num_microbatches"]


def test_deferral_evens_the_llm_out_and_leaves_the_encoder_even():
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(5, 0.5, 512), generator.lognormal(5, 0.8, 512)
    found = grouped(*assign_entrain(llm, encoder_loads=encoder, num_replicas=4, num_microbatches=8))

    def deviation(loads, groups):
        totals = np.array([loads[list(members)].sum() for members in groups])
        return totals.std() / totals.mean()

    in_order = np.arange(512).reshape(32, 16)
    assert deviation(encoder, [m for encoded, _ in found for m in encoded]) < 0.02
    assert deviation(llm, [m for _, run in found for m in run]) < 0.2 * deviation(llm, in_order)
    assert deviation(encoder, in_order) > 0.1
    at_once = sum(len({*e} & {*m}) for encoded, run in found for e, m in zip(encoded, run, strict=True))
    assert 384 < at_once < 512


def test_the_number_of_microbatches_is_lowered_on_request_only():
    batch = {"encoder_loads": [9, 1, 1, 1, 1, 1, 1, 1], "num_replicas": 1, "num_microbatches": 4}
    for least, count in ((None, 4), (1, 1), (3, 3), (9, 4)):
        assert list(assign_entrain([1] * 8, **batch, min_num_microbatches=least)[3]) == [count]


def replicas_of(llm, encoders, num_replicas):
    return assign_entrain(llm, encoder_loads=encoders, num_replicas=num_replicas, num_microbatches=2)[0]


def sums(loads, replicas, num_replicas):
    return np.bincount(replicas, loads, num_replicas).tolist()


def heaviest(units, replicas, num_replicas):
    """The heaviest load of any unit in any replica, over the larger of the mean and the largest sample."""
    least = [max(sum(loads) / num_replicas, max(loads)) for loads in units]
    return max(max(sums(loads, replicas, num_replicas)) / bound for loads, bound in zip(units, least, strict=True) if bound)


def test_replicas_are_even_in_every_unit():
    llm, encoder = [1.0, 1.0, 5.0, 5.0], [6.0, 6.0, 1.0, 1.0]
    by_rule = without_kernels(assign_entrain)(llm, encoder_loads=encoder, num_replicas=2, num_microbatches=2)
    assert by_rule[0] == [0, 1, 0, 1], "Entrain's rule"
    replicas = replicas_of(llm, [encoder], 2)
    assert sums(llm, replicas, 2) == [6.0, 6.0] and sums(encoder, replicas, 2) == [7.0, 7.0]


def test_a_sample_beyond_the_mean_in_one_unit_leaves_the_others_even():
    vision = [90.0] + [1.0] * 15
    llm = [1.0, 9.0, 8.0, 7.0, 6.0, 6.0, 5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    replicas = replicas_of(llm, [vision], 4)
    assert max(sums(llm, replicas, 4)) == sum(llm) / 4 + 0.25
    assert max(sums(vision, replicas, 4)) <= 93.0


@given(samples=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=3, max_size=7))
def test_few_samples_come_close_to_the_best_assignment(samples):
    units = [[float(each[index]) for each in samples] for index in (0, 1)]
    found = heaviest(units, replicas_of(units[0], units[1:], 3), 3)
    best = min(heaviest(units, each, 3) for each in product(range(3), repeat=len(samples)))
    assert best <= found + 1e-9 <= 1.5 * best + 2e-9


def loads_after(llm, microbatches, deferral):
    loads = [float(sum(llm[sample] for sample in members)) for members in microbatches]
    home = {sample: index for index, members in enumerate(microbatches) for sample in members}
    for sample, target in deferral.deferred:
        loads[home[sample]] -= llm[sample]
        loads[target] += llm[sample]
    return loads


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


MATRICES = st.integers(1, 5).flatmap(
    lambda rows: st.integers(rows, 6).flatmap(
        lambda columns: st.lists(st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
)


def all_matchings(matrix):
    return permutations(range(len(matrix[0])), len(matrix))


def entries(matrix, columns):
    return [row[column] for row, column in zip(matrix, columns, strict=True)]


@given(matrix=MATRICES, data=st.data())
def test_the_matching_is_the_best_of_all(matrix, data):
    width = len(matrix[0])
    row = st.lists(st.integers(0, 9), min_size=width, max_size=width)
    costs = data.draw(st.lists(row, min_size=len(matrix), max_size=len(matrix)))
    found = match_bottleneck(matrix, costs=costs)
    assert len(set(found)) == len(matrix)
    best = min((max(entries(matrix, columns)), sum(entries(costs, columns))) for columns in all_matchings(matrix))
    assert (max(entries(matrix, found)), sum(entries(costs, found))) == best
    assert least_bottleneck(matrix) == best[0]
