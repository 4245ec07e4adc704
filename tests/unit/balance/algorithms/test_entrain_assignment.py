"""Entrain's assignment, and the pairwise deferral in it."""

from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance import BALANCERS
from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.kernels import kernels
from multimodal.values.errors import AssignmentError
from tests.unit.without_kernels import without_kernels

pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels are not built")

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


def test_without_kernels_it_is_refused_and_not_tried(monkeypatch):
    with pytest.raises(AssignmentError, match="run 'pip install -e .' where this copy of Braid lies, or choose another"):
        without_kernels(assign_entrain)([1.0], encoder_loads=[1.0], num_replicas=1, num_microbatches=1)
    assert BALANCERS["entrain"].suits(())
    monkeypatch.setattr("multimodal.balance.kernels", None)
    assert not BALANCERS["entrain"].suits(()) and BALANCERS["orchmllm"].suits(())


def grouped(replicas, encoded, run, counts) -> list[tuple[list[list[int]], list[list[int]]]]:
    groups = [([[] for _ in range(count)], [[] for _ in range(count)]) for count in counts]
    for sample, (replica, *microbatches) in enumerate(zip(replicas, encoded, run, strict=True)):
        for own, microbatch in zip(groups[replica], microbatches, strict=True):
            own[microbatch].append(sample)
    return groups


@settings(max_examples=50)
@given(batch=batches())
def test_every_sample_is_encoded_once_and_in_the_llm_at_once_or_one_microbatch_later(batch):
    replicas, encoded, run, counts = assign_entrain(**batch)
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


@settings(max_examples=200)
@given(samples=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=2, max_size=14), data=st.data())
def test_the_largest_load_is_the_least_that_pairs_allow(samples, data):
    encoder, llm = ([float(each[index]) for each in samples] for index in (0, 1))
    count = 2 * data.draw(st.integers(1, min(3, len(samples) // 2)))
    [(encoded, run)] = grouped(*assign_entrain(llm, encoder_loads=encoder, num_replicas=1, num_microbatches=count))
    after = [sum(llm[sample] for sample in members) for members in run]
    before = [sum(llm[sample] for sample in members) for members in encoded]
    assert max(after) == least_largest_load(llm, encoded)
    assert sum(load * load for load in after) <= sum(load * load for load in before)
    # Pairs follow each other; their work, encoder and LLM together, rises to a peak and falls.
    shares = [loads[sample] / (sum(loads) or 1.0) for loads in (encoder, llm) for sample in range(len(samples))]
    work = [sum(shares[sample] + shares[len(samples) + sample] for sample in members) for members in encoded]
    pairs = [first + second for first, second in zip(work[::2], work[1::2], strict=True)]
    peak = pairs.index(max(pairs))
    rounded = [round(each, 9) for each in pairs]
    assert rounded[: peak + 1] == sorted(rounded[: peak + 1]) and rounded[peak:] == sorted(rounded[peak:], reverse=True)
