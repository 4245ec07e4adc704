"""Names and text of schedules, and builders and the insertion of communication against the text in tests/golden/schedule.

After a change that is meant, print the new text with `schedule_to_text` and review the difference. Orders that single policies,
builders and passes give are in tests/golden/orders.txt.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.schedule.schedule_cases import builders_for, cases, golden_cases, one_unit, written_case
from tests.unit.schedule.schedule_text import lanes_from_text, schedule_from_text, schedule_to_text

GOLDEN = Path(__file__).parents[2] / "golden" / "schedule"


def schedule_of(document: dict[str, Any]) -> Schedule:
    """Return a schedule: lanes as they are given, of a policy or a builder, rewritten by passes.

    Both dialects are valid: no action is lost, none stands twice, and nothing waits in a circle.
    """
    frozen = {key: document[key] for key in ("frozen", "frozen_projectors")}
    case = written_case(document["plan"], document["samples"], **frozen).shape
    shape = replace(case, forward_only=document["forward_only"])
    if document["lanes"]:
        schedule = schedule_from_text("\n".join(document["lanes"]), shape)
    elif document["policy"]:
        limits = {name: {(unit, 0, 0): count for unit, count in each.items()} for name, each in document["policy"].items()}
        schedule = list_schedule(shape, Policy(**limits))
    else:
        schedule = BUILDERS[document["builder"]](shape)
    for name in document["passes"]:
        schedule = PASSES[name](schedule)
    lowered = insert_communication(schedule)
    for each in (schedule, lowered):
        validate_schedule(each)
        assert schedule_from_text(schedule_to_text(each), shape, lowered=each.lowered) == each
    return lowered if document["lowered"] else schedule


def order_of(document: dict[str, Any]) -> str:
    """Return a schedule, its lanes behind each other."""
    return " // ".join(map(str, schedule_of(document).lanes))


NOTHING: dict[str, Any] = {"lanes": [], "policy": {}, "builder": "1f1b", "passes": [], "frozen": [], "frozen_projectors": []}
NOTHING |= {"lowered": False, "forward_only": False}
ORDERS: Kinds = {"order": ({"plan": {"llm": "0"}, "samples": {"llm": "0"}, **NOTHING}, order_of)}
test_every_order_is_as_written = golden_test("orders.txt", ORDERS)
SHOWN = sorted(path.name.split(".")[:2] for path in GOLDEN.glob("*.txt") if path.name.count(".") == 2)
"""(case, builder) of each text: the cases that show what a builder does."""


def test_every_builder_has_golden_text() -> None:
    """But for those that only have more rounds than another one."""
    assert {name for name, row in BUILDERS.items() if row.num_rounds <= 2} == {builder for _, builder in SHOWN}
    assert {name for name, _ in SHOWN} == set(golden_cases())
    for builder in ("gpipe", "1f1b"):
        assert [name for name, shown in SHOWN if shown == builder] == sorted(golden_cases())
    lowered = {path.name for path in GOLDEN.glob("*.txt")} - {f"{name}.{builder}.txt" for name, builder in SHOWN}
    assert lowered == {f"{name}.1f1b.lowered.txt" for name in golden_cases()}


@pytest.mark.parametrize(("name", "builder"), SHOWN)
def test_builder_gives_the_golden_schedule(name: str, builder: str) -> None:
    assert schedule_to_text(BUILDERS[builder](golden_cases()[name])) == (GOLDEN / f"{name}.{builder}.txt").read_text()


@pytest.mark.parametrize("name", golden_cases())
def test_communication_insertion_turns_golden_compute_text_into_golden_lowered_text(name: str) -> None:
    case = golden_cases()[name]
    before = schedule_from_text((GOLDEN / f"{name}.1f1b.txt").read_text(), case)
    after = insert_communication(before)
    assert schedule_to_text(after) == (GOLDEN / f"{name}.1f1b.lowered.txt").read_text()
    validate_schedule(after)


TEXT = """\
lane 0,1: F vision/0/0/3; SF vision/0/0/3>llm/1/0/2; RB vision/0/0/3<llm/1/0/2; B vision/0/0/3; RG vision/0/0
lane 2: RF llm/1/0/2<vision/0/0/3; F llm/1/0/2; B llm/1/0/2; SB llm/1/0/2>vision/0/0/3
lane 3:
"""


def test_text_round_trips() -> None:
    lanes = lanes_from_text(TEXT)
    assert "".join(f"{lane}\n" for lane in lanes) == TEXT
    assert lanes[0].ranks == (0, 1)
    assert lanes[0].actions[1] == Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 3, Place("llm", 1, 0, 2))
    assert lanes[0].actions[-1] == Action(ActionKind.REDUCE_GRADIENTS, "vision", 0, 0)
    assert lanes[2] == Lane((3,), ())


def test_a_schedule_that_others_have_read_travels_with_one_lane() -> None:
    schedule = BUILDERS["1f1b"](one_unit(3, 5))
    assert len(schedule.lanes) == 3
    alone: Any = pickle.loads(pickle.dumps(schedule.spelled_out(1)))
    assert alone._entries == {1: schedule.entries(1)} and alone == schedule


CASE = golden_cases()["two_encoders"]


def facts(row: ScheduleRow) -> dict[str, object]:
    """All that others read of a row, but its function and its name."""
    return {name: value for name, value in vars(row).items() if name not in ("build", "alias_of", "parameters")}


@pytest.mark.parametrize("name", [name for name, row in BUILDERS.items() if row.alias_of])
def test_an_alias_is_what_it_says(name: str) -> None:
    asked = BUILDERS[BUILDERS[name].alias_of]
    assert facts(asked) == facts(BUILDERS[name])
    assert asked(CASE) == BUILDERS[name](CASE)


def test_parameters_vary_what_others_read() -> None:
    assert BUILDERS["1f1b:ahead=1.5"].in_flight == 1.5
    assert BUILDERS["dip:rounds=3"].num_rounds == 3
    both = BUILDERS["optimus:keep=3,split"]
    assert (both.in_flight, both.splits_backwards) == (3.0, True)
    assert both is BUILDERS["optimus:keep=3,split"], "made once"
    assert "dip:rounds=3" not in BUILDERS, "searches try what is listed"


def test_neutral_values_change_nothing() -> None:
    for name, plain in (("1f1b:ahead=1", "1f1b"), ("dip:rounds=1", "dip"), ("optimus:keep=100", "optimus")):
        assert BUILDERS[name](CASE) == BUILDERS[plain](CASE)


@settings(max_examples=40)
@given(case=cases())
def test_a_builder_that_a_layout_does_not_allow_says_what_to_change(case: StepShape) -> None:
    for builder in set(BUILDERS) - set(builders_for(case)):
        message = rf"{builder} (needs .* found .* in the plan, or|runs encoders as one, .*;) choose "
        with pytest.raises(ScheduleError, match=message):
            BUILDERS[builder](case)
