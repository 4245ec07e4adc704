import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from multimodal.plan.planners.estimate.allocation_search import solve_allocation
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
    found = solve_allocation(work, num_gpus=num_gpus, minimums=minimums)
    assert found.bottleneck == pytest.approx(solve_linear_program(work, minimums, num_gpus), rel=1e-6)
    assert sum(found.gpus) <= num_gpus * (1 + 1e-9)
    assert all(gpus >= least * (1 - 1e-12) for gpus, least in zip(found.gpus, minimums, strict=True))
    assert max(amount / gpus for amount, gpus in zip(work, found.gpus, strict=True)) <= found.bottleneck * (1 + 1e-9)


def test_without_binding_minimums_gpus_are_proportional_to_work():
    assert solve_allocation([1.0, 3.0], num_gpus=8, minimums=[1e-3, 1e-3]).gpus == pytest.approx((2.0, 6.0))


def test_a_unit_at_its_minimum_leaves_the_rest_to_the_others():
    found = solve_allocation([0.1, 6.0], num_gpus=8, minimums=[2.0, 1.0])
    assert found.gpus == pytest.approx((2.0, 6.0)) and found.bottleneck == pytest.approx(1.0)


def test_too_few_gpus_are_refused():
    with pytest.raises(PlanError, match="need at least 5 GPUs, but there are 4"):
        solve_allocation([1.0, 1.0], num_gpus=4, minimums=[3, 2])
