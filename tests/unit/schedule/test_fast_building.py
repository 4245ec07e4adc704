from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import multimodal.schedule.list_schedule as listing
import multimodal.schedule.passes.insert_communication as lowering
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.schedule import Schedule
from tests.unit.schedule.built_schedules import rewritten_schedules
from tests.unit.schedule.schedule_cases import Case, built_cases, golden_cases


@settings(max_examples=200)
@given(built=built_cases(), forward_only=st.booleans())
def test_the_list_scheduler_in_cpp_equals_its_reference_for_every_builder(built: tuple[Case, str], forward_only: bool) -> None:
    case, builder = built
    assert listing.kernels is not None
    fast = BUILDERS[builder](*case, forward_only=forward_only)
    with patch.object(listing, "kernels", None), patch.object(listing, "_list_schedule", None):
        assert BUILDERS[builder](*case, forward_only=forward_only) == fast


@settings(max_examples=120)
@given(built=rewritten_schedules())
def test_lowering_in_cpp_equals_its_reference_for_every_builder_and_pass(built: tuple[Case, Schedule]) -> None:
    (graph, plan, assignment), schedule = built
    given = {"graph": graph, "plan": plan, "assignment": assignment}
    assert lowering.kernels is not None
    fast = insert_communication(schedule, **given)
    with patch.object(lowering, "kernels", None), patch.object(lowering, "_lower", None):
        assert insert_communication(schedule, **given) == fast


def test_schedules_of_forwards_alone_are_lowered_alike() -> None:
    for case in golden_cases().values():
        schedule = BUILDERS["1f1b"](*case, forward_only=True)
        given = {"graph": case.graph, "plan": case.plan, "assignment": case.assignment}
        fast = insert_communication(schedule, **given)
        with patch.object(lowering, "kernels", None):
            assert insert_communication(schedule, **given) == fast
