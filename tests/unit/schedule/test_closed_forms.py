"""How long one unit takes under uniform costs, and what it stores, against the formulas of the papers."""

from collections.abc import Mapping

import numpy as np
import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.values.action import ACTION_TABLE, ActionKind, Memory
from multimodal.values.shape import StepShape
from multimodal.values.timeline import TimelineEvent
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal, one_unit

SIZES = [(1, 3), (2, 2), (2, 5), (3, 3), (3, 6), (4, 4), (4, 8), (4, 13)]
"""(stages, microbatches)."""


def run(case: StepShape, builder: str, seconds: Mapping[ActionKind, float]) -> tuple[TimelineEvent, ...]:
    schedule = BUILDERS[builder](case)
    return execute_lanes(schedule, seconds=np.array([seconds.get(each.kind, 0.0) for each in schedule.work.computed])).events


def duration(events: tuple[TimelineEvent, ...]) -> float:
    return max(event.end_seconds for event in events)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize("builder", ["gpipe", "1f1b", "eager-1f1b", "dip", "encoders-colocated"])
def test_one_bubble_of_p_minus_1_forwards_and_backwards(builder: str, num_stages: int, num_microbatches: int) -> None:
    events = run(one_unit(num_stages, num_microbatches), builder, {ActionKind.FORWARD: 0.7, ActionKind.BACKWARD: 1.9})
    assert duration(events) == pytest.approx((num_microbatches + num_stages - 1) * (0.7 + 1.9), abs=1e-9)


@pytest.mark.parametrize(("num_stages", "chunks"), [(1, 3), (2, 2), (2, 4), (3, 2), (4, 2)])
@pytest.mark.parametrize("builder", ["interleaved-1f1b", "breadth-first"])
def test_interleaving_divides_the_bubble_by_the_chunks(builder: str, num_stages: int, chunks: int) -> None:
    """The bubble (P - 1) / (v m), for any number of microbatches from P on."""
    seconds = {ActionKind.FORWARD: 0.7 / chunks, ActionKind.BACKWARD: 1.9 / chunks}
    for num_microbatches in range(num_stages, 3 * num_stages + 2):
        work = num_microbatches * (0.7 + 1.9)
        bubble_fraction = (num_stages - 1) / (chunks * num_microbatches)
        events = run(one_unit(num_stages, num_microbatches, chunks=chunks), builder, seconds)
        assert duration(events) == pytest.approx(work * (1 + bubble_fraction), abs=1e-9)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (2.0, 2.0, 1.0)])
def test_zb_h1_has_a_bubble_of_p_minus_1_forwards(
    num_stages: int, num_microbatches: int, seconds: tuple[float, float, float]
) -> None:
    """The formula (P - 1) (F + I - W); it holds where a weight gradient is not longer than an input gradient."""
    kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    events = run(one_unit(num_stages, num_microbatches), "zb-h1", dict(zip(kinds, seconds, strict=True)))
    forward, gradient, weight = seconds
    bubble = (num_stages - 1) * (forward + gradient - weight)
    assert duration(events) == pytest.approx(num_microbatches * sum(seconds) + bubble, abs=1e-9)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_zb_h1_stores_no_more_than_the_first_stage_of_1f1b(num_stages: int, num_microbatches: int) -> None:
    assert peaks(one_unit(num_stages, num_microbatches), "zb-h1") == [min(num_stages, num_microbatches)] * num_stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 3), (2, 8), (3, 5), (3, 11), (4, 7), (4, 9)])
def test_zb_v_is_never_idle(num_stages: int, num_microbatches: int) -> None:
    kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    case = one_unit(num_stages, num_microbatches, v_shaped=True)
    events = run(case, "zb-v", dict.fromkeys(kinds, 1.0))
    work = 2 * num_microbatches * 3
    for lane in range(num_stages):
        of_lane = [event for event in events if event.lane == lane]
        assert of_lane[-1].end_seconds - of_lane[0].start_seconds == pytest.approx(work, abs=1e-9)
        assert of_lane[0].start_seconds == lane
    assert max(peaks(case, "zb-v")) == 2 * num_stages


@pytest.mark.parametrize(("num_microbatches", "num_rounds", "kept"), [(8, 1, 8), (8, 2, 4), (8, 4, 2), (8, 8, 1), (7, 2, 4)])
def test_an_encoder_keeps_the_microbatches_of_one_round_of_dip(num_microbatches: int, num_rounds: int, kept: int) -> None:
    sizes = {"vision": (1, 1, 1), "llm": (1, 1, 1)}
    case = build_case(build_graph("vision"), sizes, {unit: deal(num_microbatches, 1) for unit in sizes}, colocated=True)
    assert peaks(case, f"dip:rounds={num_rounds}") == [kept + 1], "and the LLM one"


def peaks(case: StepShape, builder: str) -> list[int]:
    """Most activations stored in each lane."""
    found = []
    for lane in BUILDERS[builder](case).lanes:
        stored, most = 0, 0
        for action in lane.actions:
            memory = ACTION_TABLE[action.kind].memory
            stored += (memory is Memory.ALLOCATES) - (memory is Memory.FREES)
            most = max(most, stored)
        found.append(most)
    return found
