import random
from itertools import product

import numpy as np
import pytest

from multimodal.plan.planners.templates.chain import StageTables, map_stages
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.templates.one_f_one_b import simulate_1f1b, step_ticks
from tests.unit.without_kernels import without_kernels


def random_tables(draw):
    """Tables of up to six layers, some frozen, on stages of 1, 2 and 4 GPUs; half of them with little memory."""
    count, sizes = draw.randint(1, 6), np.array([1, 2, 4][: draw.randint(1, 3)])
    forward = [draw.randint(1, 6) for _ in range(count)]
    backward = [draw.choice([0, each, 2 * each]) for each in forward]
    memory = draw.choice([10**6, draw.randint(2, 20)])
    tables = np.zeros((3, len(sizes), count, count + 1), np.int64)
    for row, first in product(range(len(sizes)), range(count)):
        for end in range(first + 1, count + 1):
            slowdown = 12 * (1 + 0.3 * row) / sizes[row]
            tables[:, row, first, end] = (
                sum(int(slowdown * each) for each in forward[first:end]),
                sum(int(slowdown * each) for each in backward[first:end]),
                max(0, memory * sizes[row] // (end - first) - 1),
            )
    return StageTables(*tables, sizes)


def shortest_step(tables, num_gpus, num_microbatches):
    """Try every mapping; None if none fits."""
    count, found = tables.forward.shape[1], []

    def extend(end, used, stages):
        if end == 0 and used == num_gpus:
            times = [[int(table[each]) for each in stages] for table in tables[:2]]
            found.append(step_ticks(*times, num_microbatches=num_microbatches))
        for row, first in product(range(len(tables.sizes)), range(end)):
            stage, gpus = (row, first, end), used + int(tables.sizes[row])
            if gpus <= num_gpus and tables.capacities[stage] >= min(len(stages) + 1, num_microbatches):
                extend(first, gpus, [stage, *stages])

    extend(count, 0, [])
    return min(found, default=None)


def test_mappings_are_those_of_an_exact_search():
    draw, num_impossible = random.Random(0), 0
    for _ in range(60):
        tables = random_tables(draw)
        gpus, counts = ([draw.randint(1, most) for _ in range(2)] for most in (10, 30))
        for mapping, *case in zip(map_stages(tables, num_gpus=gpus, num_microbatches=counts), gpus, counts, strict=True):
            assert (mapping and mapping.ticks) == shortest_step(tables, *case)
            num_impossible += mapping is None
            if mapping is not None:
                assert sum(mapping.gpus) == case[0] and mapping.ends[-1] == tables.forward.shape[1]
                bounds = list(zip((0, *mapping.ends), mapping.ends, strict=False))
                rows = [tables.sizes.tolist().index(each) for each in mapping.gpus]
                times = [[int(table[row, *bound]) for row, bound in zip(rows, bounds, strict=True)] for table in tables[:2]]
                assert step_ticks(*times, num_microbatches=case[1]) == mapping.ticks
    assert 10 < num_impossible < 110


def test_without_kernels_there_are_no_templates():
    with pytest.raises(PlanError, match="planned by the C\\+\\+ kernels.*pip install"):
        without_kernels(map_stages)(random_tables(random.Random(1)), num_gpus=[2], num_microbatches=[2])


def test_a_step_is_at_most_the_simulated_one_and_equal_where_stages_are_alike():
    draw = random.Random(2)
    for _ in range(200):
        count = draw.randint(1, 7)
        forward = [draw.randint(5, 10) for _ in range(count)]
        backward = [2 * each for each in forward]
        num_microbatches = draw.randint(1, 4 * count)
        simulated = simulate_1f1b(forward, backward, num_microbatches=num_microbatches)
        step = step_ticks(forward, backward, num_microbatches=num_microbatches)
        assert 0.9 * simulated < step <= simulated
        assert step >= num_microbatches * 3 * max(forward)
    alike = step_ticks([4] * 6, [8] * 6, num_microbatches=24)
    assert alike == (24 + 6 - 1) * 12 == simulate_1f1b([4] * 6, [8] * 6, num_microbatches=24)
