from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.replica_assignment import assign_replicas, exchange_samples
from tests.unit.without_kernels import without_kernels


def loads_of(loads, places, num_bins):
    totals = [0.0] * num_bins
    for load, place in zip(loads, places, strict=True):
        totals[place] += load
    return totals


def heaviest(units, replicas, num_replicas):
    """The heaviest load of any unit in any replica, over the larger of the mean and the largest sample."""
    least = [max(sum(loads) / num_replicas, max(loads)) for loads in units]
    return max(max(loads_of(loads, replicas, num_replicas)) / bound for loads, bound in zip(units, least, strict=True) if bound)


def longest_first(loads, num_replicas):
    replicas = [0] * len(loads)
    for replica, samples in enumerate(partition_longest_first(loads, num_bins=num_replicas)):
        for sample in samples:
            replicas[sample] = replica
    return replicas


def test_replicas_are_even_in_every_unit():
    llm, encoder = [1.0, 1.0, 5.0, 5.0], [6.0, 6.0, 1.0, 1.0]
    replicas = assign_replicas(llm, encoders=[encoder], num_replicas=2)
    assert loads_of(llm, replicas, 2) == [6.0, 6.0] and loads_of(encoder, replicas, 2) == [7.0, 7.0]


@given(samples=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12), num_replicas=st.integers(1, 3))
def test_every_replica_gets_a_sample(samples, num_replicas):
    llm, encoder = ([float(each[index]) for each in samples] for index in (0, 1))
    assert set(assign_replicas(llm, encoders=[encoder], num_replicas=num_replicas)) == set(range(num_replicas))


def test_a_sample_beyond_the_mean_in_one_unit_leaves_the_others_even():
    vision = [90.0] + [1.0] * 15
    llm = [1.0, 9.0, 8.0, 7.0, 6.0, 6.0, 5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    replicas = assign_replicas(llm, encoders=[vision], num_replicas=4)
    assert max(loads_of(llm, replicas, 4)) == sum(llm) / 4 + 0.25
    assert max(loads_of(vision, replicas, 4)) <= 93.0


@given(loads=st.lists(st.integers(0, 1000), min_size=4, max_size=40), num_replicas=st.integers(1, 4))
def test_one_unit_is_never_behind_longest_first(loads, num_replicas):
    llm = [float(load) for load in loads]
    replicas = assign_replicas(llm, encoders=[], num_replicas=num_replicas)
    most = max(loads_of(llm, longest_first(loads, num_replicas), num_replicas))
    assert max(loads_of(llm, replicas, num_replicas)) <= most * (1 + 1e-9)


@pytest.mark.parametrize("samples_per_replica", [4, 16])
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_units_together_are_not_behind_longest_first_of_one(samples_per_replica, sigma):
    generator = np.random.default_rng(0)
    vision, llm = (generator.lognormal(5, sigma, 16 * samples_per_replica).tolist() for _ in range(2))
    replicas = assign_replicas(llm, encoders=[vision], num_replicas=16)
    for loads in (llm, vision):
        assert heaviest([llm, vision], replicas, 16) < heaviest([llm, vision], longest_first(loads, 16), 16)
    if samples_per_replica == 16:
        assert heaviest([llm, vision], replicas, 16) < 1.02


@given(samples=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=3, max_size=7))
def test_few_samples_come_close_to_the_best_assignment(samples):
    units = [[float(each[index]) for each in samples] for index in (0, 1)]
    found = heaviest(units, assign_replicas(units[0], encoders=units[1:], num_replicas=3), 3)
    best = min(heaviest(units, each, 3) for each in product(range(3), repeat=len(samples)))
    assert best <= found + 1e-9 <= 1.5 * best + 2e-9


def test_exchanges_never_make_the_heaviest_replica_heavier():
    generator = np.random.default_rng(1)
    for num_samples in (3, 12, 60):
        units = generator.random((3, num_samples)).tolist()
        given = [sample % 3 for sample in range(num_samples)]
        found = exchange_samples(given, pressures=units, num_replicas=3)
        weight = [max(max(loads_of(loads, each, 3)) for loads in units) for each in (given, found)]
        assert weight[1] <= weight[0] and set(found) == {0, 1, 2}


@pytest.mark.parametrize("num_encoders", [0, 1, 2])
def test_the_kernel_assigns_many_samples_as_the_reference_does(num_encoders):
    generator = np.random.default_rng(num_encoders)
    llm, *encoders = np.floor(generator.lognormal(4, 1, (1 + num_encoders, 300))) * (generator.random(300) < 0.9)
    batch = {"encoder_loads": np.array(encoders).reshape(num_encoders, 300), "num_replicas": 24, "num_microbatches": 4}
    assert assign_entrain(llm, **batch) == without_kernels(assign_entrain)(llm, **batch)
