from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms.pairwise_deferral import least_bottleneck, match_bottleneck

MATRICES = st.integers(1, 5).flatmap(
    lambda rows: st.integers(rows, 6).flatmap(
        lambda columns: st.lists(st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
)


def all_matchings(matrix):
    return permutations(range(len(matrix[0])), len(matrix))


def entries(matrix, columns):
    return [row[column] for row, column in zip(matrix, columns, strict=True)]


def test_the_bottleneck_comes_before_the_cost():
    assert match_bottleneck([[1, 9], [1, 2]], costs=[[5, 0], [0, 5]]) == [0, 1]


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
