"""Names and text of schedules, and builders and the insertion of communication against the text in tests/golden/schedule.

After a change that is meant, print the new text with `schedule_to_text` and review the difference.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ScheduleError
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import Lane
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_graph, builders_for, cases, golden_cases, one_unit
from tests.unit.schedule.schedule_text import lanes_from_text, schedule_from_text, schedule_to_text

GOLDEN = Path(__file__).parents[2] / "golden" / "schedule"


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


def test_receives_are_hoisted_transitively_over_shared_lanes() -> None:
    """The first consumer needs only the last message, but lane 1 sent another before it, and lane 0 one before that."""
    graph = build_graph("first", "second", "third")
    layers = ((0, 10),)
    ranks = {"first": (0,), "second": (0, 1), "third": (1, 2), "llm": (3,)}
    plan = Plan({unit: UnitPlan((Replica((Stage(group, layers),)),), len(group)) for unit, group in ranks.items()})
    placed = {"first": ((Atom(2, 0),),), "second": ((Atom(1, 0),),), "third": ((Atom(0, 0),),)}
    assignment = Assignment(
        {
            **{unit: (microbatches,) for unit, microbatches in placed.items()},
            "llm": (tuple((Atom(sample),) for sample in range(3)),),
        }
    )
    before = """\
lane 0: F first/0/0/0; F second/0/0/0
lane 1: F second/0/0/0; F third/0/0/0
lane 2: F third/0/0/0
lane 3: F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
"""
    after = """\
lane 0: F first/0/0/0; SF first/0/0/0>llm/0/0/2; F second/0/0/0; SF second/0/0/0>llm/0/0/1
lane 1: F second/0/0/0; SF second/0/0/0>llm/0/0/1; F third/0/0/0; SF third/0/0/0>llm/0/0/0
lane 2: F third/0/0/0; SF third/0/0/0>llm/0/0/0
lane 3: RF llm/0/0/2<first/0/0/0; RF llm/0/0/1<second/0/0/0; RF llm/0/0/0<third/0/0/0; F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
"""
    lowered = insert_communication(schedule_from_text(before, assignment.shape(graph, plan, forward_only=True)))
    assert schedule_to_text(lowered) == after
    validate_schedule(lowered)


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
    assert alone._lanes == {1: schedule.lane(1)} and alone == schedule


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
