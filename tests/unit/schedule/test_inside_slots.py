import re
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import ComputeCost
from multimodal.references.simulate_events import simulate_events as simulate_events_reference
from multimodal.schedule.inside_slots import InsideSlots
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.move_actions import defer_receives, fill
from multimodal.schedule.passes.reduce_by_layer import gather_parameters, reduce_by_layer
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.simulate_events import EventTimes
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule, Slot, SlotMode
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import GivenCosts, RandomCosts, filled_schedules
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.schedule_text import lanes_from_text, schedule_from_text, schedule_to_text

LOCAL = RunOptions(transformer_impl="local", sequence_parallel=False)


def beside(*, encoder: tuple[int, int, int] = (1, 1, 2)) -> StepShape:
    """Three samples; an LLM of one stage over two ranks, and an encoder on the same two: by default over both."""
    sizes, groupings = {"vision": encoder, "llm": (1, 1, 2)}, {"vision": deal(3, encoder[0]), "llm": deal(3, 1)}
    return build_case(build_graph("vision"), sizes, groupings, colocated=True)


TOGETHER = (
    "lane 0,1: F vision/0/0/0; {F vision/0/0/1{0:5} @0; F vision/0/0/1{5:8} @3} F llm/0/0/0; F vision/0/0/1{8:58}; "
    "F llm/0/0/1; F vision/0/0/2; F llm/0/0/2; B llm/0/0/2; B vision/0/0/2{57:58}; {B vision/0/0/2{55:57} @1} B llm/0/0/0; "
    "{B vision/0/0/2{54:55} @2} B llm/0/0/1; B vision/0/0/2{0:54}; B vision/0/0/0; B vision/0/0/1; RG llm/0/0; RG vision/0/0\n"
)
APART = """\
lane 0: F vision/0/0/0; {F vision/0/0/1 @0} F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
lane 1: {F vision/1/0/0 @1} F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
"""


def apart() -> StepShape:
    """Forwards only of two encoder replicas, of one rank each, beside an LLM over both ranks."""
    return replace(beside(encoder=(2, 1, 1)), forward_only=True)


def check(text: str, case: StepShape, *, options: RunOptions | None = LOCAL) -> None:
    validate_schedule(schedule_from_text(text, case), options=options)


def test_text_says_in_which_wait_work_runs_and_round_trips() -> None:
    schedule = schedule_from_text(TOGETHER, beside())
    assert schedule_to_text(schedule) == TOGETHER
    slots = schedule.lane(0).slots
    assert slots[1] == Slot(lanes_from_text("lane 0: F vision/0/0/1{0:5}")[0].actions[0], SlotMode.INSIDE, 0)
    assert [(index, slot.wait) for index, slot in enumerate(slots) if slot.wait >= 0] == [(1, 0), (2, 3), (10, 1), (12, 2)]
    mixed = "lane 0: {W llm/0/0/0; F vision/0/0/3{0:2} @4} F llm/0/0/1\n"
    assert [(slot.mode, slot.wait) for slot in lanes_from_text(mixed)[0].slots] == [(1, -1), (2, 4), (0, -1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(LOCAL, num_overlapped_parts=4), "it runs inside wait 0 of F llm/0/0/0, which has 0 waits"),
        (replace(LOCAL, sequence_parallel=True), "F vision/0/0/1{0:5}: it waits for a collective of 2 tensor"),
    ],
)
def test_the_options_of_a_run_decide_what_fits(options: RunOptions, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(TOGETHER, beside(), options=options)


def test_a_wait_is_as_long_as_what_fills_it_in_any_lane() -> None:
    """An LLM's forwards take 4 s, of which it waits 1 s two times; an encoder's 1.5 s in replica 0, 0.5 s in replica 1."""
    of_units = {("llm", 0): ComputeCost(4.0, 2.5, (1.0, 1.0)), ("vision", 0): 1.5, ("vision", 1): 0.5}
    costs = GivenCosts(seconds=lambda action: of_units[action.unit, action.replica])
    found = simulate_schedule(insert_communication(schedule_from_text(APART, apart())), costs)
    events = {(action_to_text(event.action), event.lane): event for event in found.timeline.events}
    times = {key: (event.start_seconds, event.end_seconds) for key, event in events.items()}
    interval = 2 / 3
    assert times["F llm/0/0/0", 0] == times["F llm/0/0/0", 1] == (1.5, 6.0)
    assert times["F vision/0/0/1", 0] == pytest.approx((1.5 + interval, 3.0 + interval))
    assert times["F vision/1/0/0", 1] == pytest.approx((3.0 + 2 * interval, 3.5 + 2 * interval))
    assert found.iteration_seconds == 14.0
    assert found.busy_seconds == pytest.approx((1.5 + 1.5 + 3 * 1.5, 0.5 + 3 * 1.5))
    assert found.bubble["tp"] == pytest.approx(((3 * 2.5 + 0.5 - 1.5) + (3 * 2.5 + 0.5 - 0.5)) / 28)
    assert sum(found.bubble.values()) + found.busy_fraction == pytest.approx(1.0)
    assert found.peak_activation_bytes == (20, 20), "work inside is kept while its carrier runs"
    seconds = {place[:2]: total for place, total in found.stage_seconds.items()}
    assert seconds == {("vision", 0): 1.5, ("vision", 1): 0.5, ("llm", 0): 4.0}


def _seconds_of_waits() -> dict[Action, dict[int, dict[int, float]]]:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(float)))


@settings(max_examples=60)
@given(schedule=filled_schedules(), data=st.data())
def test_any_work_inside_runs_within_its_carrier_and_both_simulators_agree(schedule: Schedule, data: st.DataObject) -> None:
    lowered = insert_communication(schedule)
    for each in (schedule, lowered):
        validate_schedule(each, options=LOCAL)
        assert schedule_from_text(schedule_to_text(each), schedule.shape, lowered=each.lowered) == each
    costs = RandomCosts(seed=data.draw(st.integers(0, 9)), num_waits=data.draw(st.integers(0, 4)))
    found = simulate_schedule(lowered, costs)
    reference = EventTimes(*simulate_events_reference(**vars(found.compiled.arrays)))
    assert found.times.end_seconds.tolist() == reference.end_seconds.tolist()
    events = {(event.action, event.lane): event for event in found.timeline.events}
    inside, work = InsideSlots.of(lowered), lowered.work
    filled, behind = (_seconds_of_waits(), _seconds_of_waits())
    columns = (inside.pieces, inside.carriers, inside.lanes, inside.waits)
    for piece, carrier, lane, wait in zip(*(column.tolist() for column in columns), strict=True):
        own, whole = (events.get((work.action(each), lane)) for each in (piece, carrier))
        assert own is not None
        if whole is None:
            continue  # carriers that take no time have no event
        assert whole.start_seconds <= own.start_seconds <= own.end_seconds <= whole.end_seconds * (1 + 1e-9)
        cost = costs.compute(work.action(piece))
        filled[work.action(carrier)][wait][lane] += cost.seconds - cost.tensor_parallel_seconds
        behind[work.action(carrier)][wait][lane] += cost.tensor_parallel_seconds
    for carrier, of_waits in filled.items():
        cost = costs.compute(carrier)
        alone = [*cost.waits, *[0.0] * 4]
        interval = (cost.seconds - sum(cost.waits)) / (1 + max(len(cost.waits), 1 + max(of_waits)))
        expected = cost.seconds + sum(max(0.0, max(of_lanes.values()) - alone[wait]) for wait, of_lanes in of_waits.items())
        expected += sum(max(0.0, max(of_lanes.values()) - interval) for of_lanes in behind[carrier].values())
        event = next((event for (action, _), event in events.items() if action == carrier), None)
        assert (0.0 if event is None else event.end_seconds - event.start_seconds) == pytest.approx(expected, abs=1e-12)


def test_passes_leave_work_inside_where_it_is() -> None:
    forwards = TOGETHER[: TOGETHER.index("B llm")]
    backwards = (
        "B llm/0/0/0; B vision/0/0/0{57:58}; {B vision/0/0/0{55:57} @1} B llm/0/0/1; {B vision/0/0/0{54:55} @2} B llm/0/0/2; "
        "RG llm/0/0; B vision/0/0/0{0:54}; B vision/0/0/1; B vision/0/0/2; RG vision/0/0"
    )
    schedule = schedule_from_text(forwards + backwards, beside())
    by_layer = reduce_by_layer(schedule)
    assert by_layer.shape.cuts.reduced_by_layer == {("vision", 0)}, "something is inside the LLM's last backward"
    for rewritten in (by_layer, fill(schedule), gather_parameters(schedule)):
        validate_schedule(rewritten, options=LOCAL)
        inside = {slot for slot in rewritten.lane(0).slots if slot.mode is SlotMode.INSIDE}
        assert inside == {slot for slot in schedule.lane(0).slots if slot.mode is SlotMode.INSIDE}
    with pytest.raises(ScheduleError, match="passes that move actions know where to put weight gradients between computations"):
        defer_receives(schedule)
