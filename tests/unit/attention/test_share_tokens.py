import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.share_tokens import distribute_tokens
from tests.unit.without_kernels import without_kernels

WORKLOADS = st.one_of(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 2**57), max_size=30)).map(
    lambda workloads: np.array(workloads, dtype=np.int64)
)


BOTH = [distribute_tokens, without_kernels(distribute_tokens)]


def loads(workloads, num_ranks, *, distribute=distribute_tokens, **options):
    found = np.zeros(num_ranks, np.int64)  # sums may be larger than what a float counts exactly
    np.add.at(found, distribute(np.array(workloads), num_ranks=num_ranks, **options), workloads)
    return found


@pytest.mark.parametrize("distribute", BOTH)
def test_the_longest_block_goes_to_the_least_loaded_rank(distribute):
    assert distribute([7, 5, 4, 4], num_ranks=2).tolist() == [0, 1, 1, 0]
    assert loads([6, 1, 1, 1, 1, 2], 2, distribute=distribute).tolist() == [8, 4]


def test_blocks_are_exchanged_after_the_greedy_step():
    # Greedy alone: 7 + 4 + 3 = 14 and 6 + 5 + 1 = 12.
    assert loads([7, 6, 5, 4, 3, 1], 2).tolist() == [13, 13]


def test_zigzag_pairs_the_first_chunk_with_the_last():
    assert distribute_tokens([1] * 8, num_ranks=2, method="zigzag").tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert loads(range(1, 33), 4, method="zigzag").tolist() == [132] * 4


def test_ring_cuts_in_order():
    assert distribute_tokens([1] * 5, num_ranks=2, method="ring").tolist() == [0, 0, 0, 1, 1]


def test_random_depends_on_the_seed_alone():
    first = distribute_tokens([5] * 64, num_ranks=4, method="random", seed=1)
    assert np.array_equal(first, distribute_tokens([0] * 64, num_ranks=4, method="random", seed=1))
    assert not np.array_equal(first, distribute_tokens([5] * 64, num_ranks=4, method="random", seed=2))


@pytest.mark.parametrize("distribute", BOTH)
@pytest.mark.parametrize(("method", "largest_difference"), [("lpt", 1), ("random", 1), ("ring", 1), ("zigzag", 2)])
@given(workloads=WORKLOADS, num_ranks=st.integers(1, 9))
def test_every_block_has_a_rank_and_counts_are_even(method, largest_difference, distribute, workloads, num_ranks):
    owners = distribute(workloads, num_ranks=num_ranks, method=method)
    assert owners.dtype == np.int32
    assert owners.shape == workloads.shape
    counts = np.bincount(owners, minlength=num_ranks)
    assert len(counts) == num_ranks
    assert counts.max() - counts.min() <= largest_difference


@given(workloads=WORKLOADS, num_ranks=st.integers(1, 9))
def test_exchanges_never_load_the_most_loaded_rank_further(workloads, num_ranks):
    exchanged, placed = (loads(workloads, num_ranks, distribute=distribute).max() for distribute in BOTH)
    assert exchanged <= placed
