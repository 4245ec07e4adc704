from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.reorder_samples import reorder_samples
from multimodal.values.errors import AssignmentError


def heaviest(sizes, groups):
    return max(sum(sizes[sample] for sample in members) for members in groups)


def test_samples_go_to_the_lightest_group_in_either_order():
    sizes = [4, 1, 3, 2]
    assert reorder_samples(sizes, num_groups=2) == ((0, 1), (2, 3))
    assert reorder_samples(sizes, num_groups=2, ascending=True) == ((1, 2), (3, 0))


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=7), num_groups=st.integers(1, 3), ascending=st.booleans())
def test_each_order_keeps_its_bound(sizes, num_groups, ascending):
    groups = reorder_samples(sizes, num_groups=num_groups, ascending=ascending)
    assert sorted(sample for members in groups for sample in members) == list(range(len(sizes)))
    best = min(
        heaviest(sizes, [[s for s, at in enumerate(places) if at == group] for group in range(num_groups)])
        for places in product(range(num_groups), repeat=len(sizes))
    )
    bound = 2 - 1 / num_groups if ascending else 4 / 3
    assert best <= heaviest(sizes, groups) <= bound * best + 1e-9


def test_descending_is_more_even_on_long_tails():
    generator = np.random.default_rng(0)
    for num_groups in (4, 16):
        sizes = generator.lognormal(5, 1, 512).tolist()
        descending, ascending = (heaviest(sizes, reorder_samples(sizes, num_groups=num_groups, ascending=a)) for a in (0, 1))
        assert descending < ascending


@pytest.mark.parametrize(
    ("sizes", "num_groups", "message"),
    [
        ([], 2, "the global batch has no samples; give at least one"),
        ([1, 2], 0, "cannot partition 2 items into 0 bins"),
        ([1, -2], 2, "item 1 has cost -2"),
        ([1, float("nan")], 2, "item 1 has cost nan"),
    ],
)
@pytest.mark.parametrize("ascending", [False, True])
def test_wrong_arguments_are_named(sizes, num_groups, message, ascending):
    with pytest.raises(AssignmentError, match=message):
        reorder_samples(sizes, num_groups=num_groups, ascending=ascending)
