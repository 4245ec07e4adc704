from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.pair_order import order_pairs


def test_light_pairs_run_at_both_ends():
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert order_pairs(pairs, work=[5, 5, 1, 1, 4, 4, 3, 3, 1]) == [8, 6, 7, 0, 1, 4, 5, 2, 3]


def test_equal_pairs_go_by_index():
    assert order_pairs([[1, 0], [2, 3], [4]], work=[1, 1, 1, 1, 2]) == [1, 0, 4, 2, 3]


@given(work=st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_work_rises_to_a_peak_and_falls(work):
    order = order_pairs([[index] for index in range(len(work))], work=work)
    assert sorted(order) == list(range(len(work)))
    along = [work[index] for index in order]
    peak = along.index(max(along))
    assert along[: peak + 1] == sorted(along[: peak + 1]) and along[peak:] == sorted(along[peak:], reverse=True)
