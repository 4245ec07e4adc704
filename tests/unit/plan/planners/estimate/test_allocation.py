import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from multimodal.plan.planners.estimate.allocation_search import least_bottleneck
from multimodal.values.errors import PlanError

UNITS = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.1, 4)), min_size=1, max_size=5)


def solve_linear_program(work, minimums, num_gpus):
    """The same problem for a general solver: with s = 1 / t it is linear. Maximise s with work_i s <= x_i, sum(x) <= N."""
    count = len(work)
    matrix = np.zeros((count + 1, count + 1))
    matrix[:count, 0] = work
    matrix[:count, 1:] = -np.eye(count)
    matrix[count, 1:] = 1.0
    limits = np.array([*[0.0] * count, num_gpus])
    found = linprog(
        np.array([-1.0, *[0.0] * count]), A_ub=matrix, b_ub=limits, bounds=[(0, None), *((m, None) for m in minimums)]
    )
    return -1 / found.fun


@settings(max_examples=25)
@given(UNITS, st.floats(1.0, 20.0))
def test_closed_form_equals_a_general_solver(units, spare):
    work, minimums = zip(*units, strict=True)
    num_gpus = sum(minimums) + spare
    found = least_bottleneck(work, num_gpus=num_gpus, minimums=minimums)
    assert found == pytest.approx(solve_linear_program(work, minimums, num_gpus), rel=1e-6)


def test_units_above_their_minimum_are_equally_slow():
    assert least_bottleneck([1.0, 3.0], num_gpus=8, minimums=[1e-3, 1e-3]) == pytest.approx(0.5)
    assert least_bottleneck([0.1, 6.0], num_gpus=8, minimums=[2.0, 1.0]) == pytest.approx(1.0)


def test_too_few_gpus_are_refused():
    with pytest.raises(PlanError, match="need at least 5 GPUs, but there are 4"):
        least_bottleneck([1.0, 1.0], num_gpus=4, minimums=[3, 2])
