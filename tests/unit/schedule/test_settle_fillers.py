"""Fillers get their places from costs, before the step runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import passes_named
from multimodal.schedule.settle_fillers import settle_fillers
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import cases
from tests.unit.schedule.uniform_costs import RandomCosts


@given(case=cases(), seed=st.integers(0, 1000), builder=st.sampled_from(("1f1b", "zb-h1", "gpipe")))
def test_the_order_is_that_of_the_simulation(case: StepShape, seed: int, builder: str) -> None:
    lowered = build_schedule(BUILDERS[builder], case, passes=passes_named("fill"))
    costs = RandomCosts(seed=seed)
    settled = settle_fillers(lowered, costs)
    validate_schedule(settled)
    assert not any(lane.fillers for lane in settled.lanes)
    assert [sorted(lane.actions, key=repr) for lane in settled.lanes] == [
        sorted(lane.actions, key=repr) for lane in lowered.lanes
    ]
    before, after = (simulate_schedule(each, costs).iteration_seconds for each in (lowered, settled))
    assert after == pytest.approx(before, rel=1e-9)
