"""Names of schedules with parameters: what they stand for, and what is refused."""

import pytest
from hypothesis import given, settings

from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import builders_for, cases, golden_cases

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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zigzag", "there is no schedule 'zigzag'; choose one of gpipe, "),
        ("zigzag:rounds=2", "there is no schedule 'zigzag'"),
        ("gpipe:rounds=2", "schedule 'gpipe:rounds=2' has no parameter 'rounds'; 'gpipe' has: none"),
        ("dip:", "schedule 'dip:' has no parameter ''; 'dip' has: rounds=a whole number of at least 1"),
        ("optimus:zb", "has no parameter 'zb'; 'optimus' has: keep=a factor of at least 1, split$"),
        ("dip:rounds=0", "schedule 'dip:rounds=0': rounds takes a whole number of at least 1, found '0'"),
        ("dip:rounds", "rounds takes a whole number of at least 1, found ''"),
        ("dip:rounds=2,rounds=3", "is given twice the parameter 'rounds'"),
        ("1f1b:ahead=0.5", "ahead takes a factor of at least 1 or memory, found '0.5'"),
        ("1f1b:ahead=nan", "found 'nan'"),
        ("zb-h1:ahead=2", "ahead takes memory, found '2'"),
        ("optimus:split=2", "split takes no value, found '2'"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_known(name: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        BUILDERS[name]


@settings(max_examples=40)
@given(case=cases())
def test_a_builder_that_a_layout_does_not_allow_says_what_to_change(case: StepShape) -> None:
    for builder in set(BUILDERS) - set(builders_for(case)):
        message = rf"{builder} (needs .* found .* in the plan, or|runs encoders as one, .*;) choose "
        with pytest.raises(ScheduleError, match=message):
            BUILDERS[builder](case)
