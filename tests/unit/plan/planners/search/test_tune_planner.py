"""The climb over microbatch sizes by which a planner is tuned."""

import pytest

from multimodal.plan.planners.search.tune_planner import climb

SIZES = (1, 2, 4, 8, 16)


def looked_at(seconds, *, below=float("inf"), first=2):
    """List the sizes that a climb from `first` looks at."""
    sizes = []

    def look_at(size):
        sizes.append(size)
        return seconds[SIZES.index(size)]

    climb(SIZES, look_at, first=first, below=below)
    return sizes


@pytest.mark.parametrize(
    ("seconds", "expected"), [((5, 4, 3, 2, 1), [4, 8, 16, 2]), ((1, 2, 3, 4, 5), [4, 8, 2, 1]), ((2, 1, 3, 4, 5), [4, 8, 2, 1])]
)
def test_sizes_are_looked_at_while_steps_get_shorter(seconds, expected):
    assert looked_at(seconds) == expected


def test_far_behind_a_known_run_only_great_strides_are_followed():
    assert looked_at((9, 9, 9, 8, 7), below=1.0) == [4, 8, 2]
    assert looked_at((9, 9, 9, 7, 5), below=1.0) == [4, 8, 16, 2]
    assert looked_at((9, 9, 9, 8, 7), below=5.0) == [4, 8, 16, 2]
    assert looked_at((9, 9, float("inf"), 8, 7), below=1.0)[:2] == [4, 8], "what does not fit says nothing"
