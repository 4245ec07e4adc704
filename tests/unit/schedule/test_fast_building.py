from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.list_schedule as listing
from multimodal.schedule.builders import BUILDERS
from multimodal.values.step_graph import StepGraph
from tests.unit.schedule.schedule_cases import built_cases


@settings(max_examples=200)
@given(built=built_cases(), forward_only=st.booleans())
def test_the_list_scheduler_in_cpp_equals_its_reference_for_every_builder(
    built: tuple[StepGraph, str], forward_only: bool
) -> None:
    case, builder = built
    assert listing.kernels is not None
    step = replace(case, forward_only=forward_only)
    fast = BUILDERS[builder](step)
    with patch.object(listing, "kernels", None):
        assert BUILDERS[builder](step) == fast
