import numpy as np
import pytest

from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.values.errors import AssignmentError


@pytest.mark.parametrize(
    ("form", "cost"),
    [
        (CostForm.LINEAR, 3 + 5 + 1),
        (CostForm.LINEAR_QUADRATIC, 9 + 0.5 * (9 + 25 + 1)),
        (CostForm.PADDED, 3 * 5),
        (CostForm.PADDED_ATTENTION, 9 + 0.5 * 3 * 25),
    ],
)
def test_each_form_costs_what_the_paper_says(form, cost):
    assert LengthCost(form, 0.5).row_costs(np.array([0, 3, 3, 4]), np.array([3, 5, 1, 0])).tolist() == [cost, 0, 0]


def test_a_form_is_found_by_its_name():
    assert LengthCost("padded-attention").form is CostForm.PADDED_ATTENTION
    assert [str(form) for form in CostForm] == ["linear", "linear+quadratic", "padded", "padded-attention"]


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(AssignmentError, match=f"quadratic weight {weight}; give a finite number that is not negative"):
        LengthCost(CostForm.LINEAR_QUADRATIC, weight)
