"""Partitions and cuts: kernels against their references, and both against brute force."""

import shutil
from functools import partial
from hashlib import sha256
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms import longest_first_partition
from multimodal.balance.algorithms.cut_evenly import cut_evenly, cut_evenly_reference
from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.algorithms.longest_first_partition import partition_longest_first
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import row_starts
from tests.unit.without_kernels import without_kernels

ROWS = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 9)), min_size=1, max_size=4)


@given(rows=ROWS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_the_kernel_equals_its_reference(rows: list[tuple[list[int], int]]) -> None:
    starts = row_starts([len(amounts) for amounts, _ in rows])
    amounts = np.array([amount for amounts, _ in rows for amount in amounts], np.int64)
    counts = np.array([count for _, count in rows])
    found, wanted = (cut(amounts, starts, counts) for cut in (kernels.cut_evenly, cut_evenly_reference))
    assert [column.tolist() for column in found] == [column.tolist() for column in wanted]


def largest_run(amounts: list[int], count: int) -> int:
    """The least that the largest of at most `count` runs can be, by trying all cuts."""
    if count == 1 or not amounts:
        return sum(amounts)
    return min(max(sum(amounts[:cut]), largest_run(amounts[cut:], count - 1)) for cut in range(1, len(amounts) + 1))


@given(amounts=st.lists(st.integers(0, 9), min_size=1, max_size=7), count=st.integers(1, 5))
def test_the_largest_run_is_the_least_possible_and_none_is_empty(amounts: list[int], count: int) -> None:
    starts, of_rows = cut_evenly(np.array(amounts), np.array([0, len(amounts)]), np.array([count]))
    assert of_rows.tolist() == [0, min(count, len(amounts))]
    assert (np.diff(starts) > 0).all()
    assert max(map(sum, np.split(np.array(amounts), starts[1:-1]))) == largest_run(amounts, count)


COSTS = st.one_of(
    st.lists(st.integers(0, 20), max_size=40),
    st.lists(st.floats(0, 1e6), max_size=40),
    st.lists(st.one_of(st.integers(0, 2**60), st.floats(0, 1e18)), max_size=10),
)


def test_the_kernel_is_built_where_a_compiler_is():
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")
    assert longest_first_partition.kernels is not None, "run 'pip install -e .' to build multimodal._kernels"


@pytest.mark.parametrize(
    ("costs", "num_bins", "bins"),
    [
        ([2, 9, 5, 3], 2, [[1], [2, 3, 0]]),
        ([2, 2, 2, 2, 2], 3, [[0, 3], [1, 4], [2]]),
        ([10, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([], 2, [[], []]),
    ],
)
def test_the_longest_item_joins_the_least_loaded_bin(costs, num_bins, bins):
    assert partition_longest_first(costs, num_bins=num_bins) == bins


@given(costs=COSTS, num_bins=st.integers(1, 9))
def test_bins_the_kernel_equals_its_reference(costs, num_bins):
    bins = partition_longest_first(costs, num_bins=num_bins)
    assert bins == without_kernels(partition_longest_first)(costs, num_bins=num_bins)
    assert sorted(index for members in bins for index in members) == list(range(len(costs)))


def lengths_of(draw: Random) -> list[int]:
    """Long-tailed lengths of up to 400 items."""
    return [1 + int(50 / (1.001 - draw.random())) for _ in range(1 + int(draw.random() * 400 * draw.random()))]


def post_balanced(draw: Random, form: CostForm) -> object:
    return post_balance(lengths_of(draw), num_bins=2 + int(30 * draw.random()), cost=LengthCost(form, 0.01)).tolist()


def assigned(draw: Random) -> object:
    llm = lengths_of(draw)
    encoders = [[length * (draw.random() < 0.7) for length in llm] for _ in range(int(3 * draw.random()))]
    loads = np.array(encoders).reshape(-1, len(llm))
    return assign_entrain(llm, encoder_loads=loads, num_replicas=min(len(llm), 12), num_microbatches=4)


def rearranged(draw: Random) -> object:
    volume = [[int(30 * draw.random()) for _ in range(24)] for _ in range(24)]
    return rearrange_nodes(volume, ranks_per_node=4).permutation.tolist()


DIGESTS = {
    "linear": (partial(post_balanced, form=CostForm.LINEAR), "2e226fad04f742f0"),
    "linear+quadratic": (partial(post_balanced, form=CostForm.LINEAR_QUADRATIC), "e41c14e1365ebfb1"),
    "padded": (partial(post_balanced, form=CostForm.PADDED), "503b35ef2a56c507"),
    "padded-attention": (partial(post_balanced, form=CostForm.PADDED_ATTENTION), "d56882e6c2cdb841"),
    "entrain": (assigned, "8332773769c6f55a"),
    "nodes": (rearranged, "92533259b4140324"),
}


@pytest.mark.skipif(kernels is None, reason="without kernels nothing is searched")
@pytest.mark.parametrize("name", DIGESTS)
def test_kernels_decide_as_before(name: str) -> None:
    decide, digest = DIGESTS[name]
    draw = Random(0)
    assert sha256(repr([decide(draw) for _ in range(60)]).encode()).hexdigest()[:16] == digest
