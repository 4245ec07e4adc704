"""The estimated step of an interleaved chain against closed forms and against the simulator."""

import numpy as np
import pytest

from multimodal.plan.planners.estimate.chain_estimate import ChainRange, chain_seconds, chunks_in_flight


def even(num_ranges):
    return [ChainRange(1.0, 2.0)] * num_ranges


def test_gathering_delays_the_first_forwards_and_reducing_follows_the_last_backwards():
    plain = chain_seconds(even(4), num_lanes=2, num_microbatches=4)
    first = [ChainRange(1.0, 2.0, gathering_seconds=5.0), *even(3)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    # The first range's last backward ends the step; the last range's is long past, and hides its reduction.
    first = [ChainRange(1.0, 2.0, reducing_seconds=5.0), *even(3)]
    last = [*even(3), ChainRange(1.0, 2.0, reducing_seconds=1.0)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    assert chain_seconds(last, num_lanes=2, num_microbatches=4) == pytest.approx(plain)


def test_lanes_keep_as_many_microbatches_as_the_order_of_interleaved_1f1b_says():
    states = chunks_in_flight(0, num_lanes=4, chunks=3, num_microbatches=16)
    assert states.sum(axis=1).max() == 2 * 3 + 2 * 4 + 1
    assert np.array_equal(states[-1], [0, 0, 0])
