import random

import pytest

from multimodal.plan.planners.templates.template_set import PipelineTimes
from tests.unit.plan.planners.templates.one_f_one_b import simulate_1f1b


def random_times(draw):
    forward = tuple(draw.uniform(0.1, 1.0) for _ in range(draw.randint(1, 8)))
    return PipelineTimes(forward, tuple(2 * each for each in forward))


def test_seconds_are_the_simulated_ones_nearly_always():
    draw, num_equal = random.Random(0), 0
    for _ in range(300):
        times = random_times(draw)
        count = draw.randint(times.num_stages, 5 * times.num_stages)
        simulated = simulate_1f1b(times.forward, times.backward, num_microbatches=count)
        assert 0.95 * simulated < times.seconds(count) <= simulated * (1 + 1e-12)
        num_equal += times.seconds(count) == pytest.approx(simulated, rel=1e-12)
    assert num_equal > 250


def test_most_microbatches_inverts_seconds():
    draw = random.Random(1)
    for _ in range(200):
        times = random_times(draw)
        count = draw.randint(1, 40)
        seconds = times.seconds(count)
        assert times.most_microbatches(seconds) == count
        assert times.most_microbatches(0.999 * seconds) < count
    assert times.seconds(0) == 0 and times.most_microbatches(0.0) == 0


def test_more_microbatches_take_longer():
    times = random_times(random.Random(2))
    steps = [times.seconds(count) for count in range(1, 30)]
    assert steps == sorted(steps) and steps[0] == pytest.approx(sum(times.forward) + sum(times.backward))
