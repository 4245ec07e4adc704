import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.plan.partition_layers import partition_layers, partition_unit, range_seconds, unit_pieces
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import LLM


def brute_force(seconds: list[float], num_stages: int) -> float:
    cuts = itertools.combinations(range(1, len(seconds)), num_stages - 1)
    return min(max(sum(seconds[first:end]) for first, end in itertools.pairwise((0, *cut, len(seconds)))) for cut in cuts)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_the_slowest_range_is_as_fast_as_any_cut_allows(seconds, data):
    num_stages = data.draw(st.integers(1, len(seconds)))
    ranges = partition_layers(seconds, num_stages=num_stages)
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(len(seconds)))
    assert len(ranges) == num_stages and all(first < end for first, end in ranges)
    assert max(range_seconds(seconds, ranges)) == brute_force(seconds, num_stages)


def test_equally_good_cuts_are_spread_evenly():
    assert partition_layers([1.0] * 7, num_stages=3) in (
        ((0, 3), (3, 5), (5, 7)),
        ((0, 2), (2, 5), (5, 7)),
        ((0, 2), (2, 4), (4, 7)),
    )


def test_a_heavy_head_gets_fewer_transformer_layers():
    seconds = [0.0, *[1.0] * 8, 4.0]
    assert partition_unit(LLM, seconds, num_stages=2) == ((0, 7), (7, 10))


def test_ends_of_a_unit_stay_with_a_transformer_layer():
    assert unit_pieces(LLM)[0] == (0, 2) and unit_pieces(LLM)[-1] == (8, 10) and len(unit_pieces(LLM)) == 8


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanError, match=r"unit 'llm': 8 transformer layers cannot be cut into 9 stages"):
        partition_unit(LLM, [1.0] * 10, num_stages=9)
