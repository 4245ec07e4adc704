"""What is said to schedules that cannot run: the first lines of the errors, in tests/golden/wrong_schedules.txt.

`python -m tests.unit.schedule.test_wrong_schedules` writes the answers anew.
"""

from collections.abc import Callable
from typing import Any

from multimodal.cost.run_options import RunOptions
from multimodal.schedule.validate import validate_schedule
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from tests.unit.golden_answers import Kinds, differing, write
from tests.unit.schedule.schedule_cases import small
from tests.unit.schedule.schedule_text import schedule_from_text
from tests.unit.schedule.test_inside_slots import LOCAL, TOGETHER, beside
from tests.unit.schedule.test_validate_schedule import LLM, VISION

RANGES = "lane 0: F vision/0/0/0{0:2}; F vision/0/0/0{2:58}; F vision/0/0/1; B vision/0/0/0{9:58}; B vision/0/0/0{0:9}; "
RANGES += f"B vision/0/0/1; RG vision/0/0\n{LLM}"


def check(text: str, shape: StepShape, options: RunOptions | None = None) -> None:
    try:
        validate_schedule(schedule_from_text(text, shape), options=options)
    except ScheduleError as problem:
        raise ScheduleError(str(problem).partition("\n")[0]) from None


def rewritten(text: str, shape: StepShape, options: RunOptions | None = None) -> tuple[Any, Callable[[Any], None]]:
    """Have a schedule with some of its text replaced."""
    return {"now": "F", "then": "F"}, lambda given: check(text.replace(given["now"], given["then"]), shape, options)


SCHEDULES: Kinds = {
    "schedule": ({"vision": VISION, "llm": LLM}, lambda given: check(f"{given['vision']}\n{given['llm']}", small())),
    "ranges": rewritten(RANGES, small()),
    "inside": rewritten(TOGETHER, beside(), LOCAL),
}


def test_every_schedule_is_answered_as_written() -> None:
    assert differing("wrong_schedules.txt", SCHEDULES) == []


if __name__ == "__main__":
    write("wrong_schedules.txt", SCHEDULES)
