from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.link_actions as linking
import multimodal.schedule.list_schedule as listing
from multimodal.schedule.builders import BUILDERS
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import built_cases


@settings(max_examples=200)
@given(built=built_cases(), forward_only=st.booleans())
def test_the_list_scheduler_in_cpp_equals_its_reference_for_every_builder(
    built: tuple[StepShape, str], forward_only: bool
) -> None:
    case, builder = built
    assert listing.kernels is not None
    step = replace(case, forward_only=forward_only)
    fast = BUILDERS[builder](step)
    with patch.object(listing, "kernels", None), patch.object(linking, "kernels", None):
        assert BUILDERS[builder](step) == fast


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_action_that_waits_for_none_that_is_scheduled_is_refused(is_fast: bool) -> None:
    columns = {"flags": np.zeros(1, np.uint8), "microbatches": np.zeros(1, np.int64)}
    pairs = dict.fromkeys(("before", "after"), np.zeros(0, np.int64))
    needs = {"need_starts": np.array([0, 0, 1]), "needs": np.array([0])}
    with (
        patch.object(linking, "kernels", linking.kernels if is_fast else None),
        pytest.raises(IndexError, match="not scheduled"),
    ):
        linking.link_actions(listed=np.array([1]), **needs, **columns, **pairs)
