from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.list_schedule as listing
import multimodal.schedule.passes.insert_communication as lowering
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.schedule import Schedule
from multimodal.values.step_graph import StepGraph
from tests.unit.schedule.built_schedules import rewritten_schedules
from tests.unit.schedule.schedule_cases import built_cases, golden_cases


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


@settings(max_examples=120)
@given(built=rewritten_schedules())
def test_lowering_in_cpp_equals_its_reference_for_every_builder_and_pass(built: tuple[StepGraph, Schedule]) -> None:
    _, schedule = built
    assert lowering.kernels is not None
    fast = insert_communication(schedule)
    with patch.object(lowering, "kernels", None):
        assert insert_communication(schedule) == fast


def test_schedules_of_forwards_alone_are_lowered_alike() -> None:
    for case in golden_cases().values():
        schedule = BUILDERS["1f1b"](replace(case, forward_only=True))
        fast = insert_communication(schedule)
        with patch.object(lowering, "kernels", None):
            assert insert_communication(schedule) == fast
