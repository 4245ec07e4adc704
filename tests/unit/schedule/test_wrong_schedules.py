"""What is said to schedules that cannot run: the first lines of the errors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multimodal.cost.run_options import RunOptions
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.validate import validate_schedule
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal, golden_cases, one_unit, small
from tests.unit.schedule.schedule_text import schedule_from_text, schedule_to_text
from tests.unit.schedule.test_inside_slots import APART, LOCAL, TOGETHER, apart, beside
from tests.unit.schedule.test_passes import deferred, llm
from tests.unit.schedule.test_validate_schedule import LLM, VISION

RANGES = "lane 0: F vision/0/0/0{0:2}; F vision/0/0/0{2:58}; F vision/0/0/1; B vision/0/0/0{9:58}; B vision/0/0/0{0:9}; "
RANGES += f"B vision/0/0/1; RG vision/0/0\n{LLM}"
SUBSETS = f"{VISION.replace('B vision/0/0/0', 'B vision/0/0/0#0; B vision/0/0/0#1')}\n{LLM}"
BY_LAYER = "lane 0: F llm/0/0/0; RG llm/0/0[1:10]; B llm/0/0/0; RG llm/0/0[0:1]"
STAGES = """\
lane 0: F llm/0/0/0; SF llm/0/0/0>llm/0/1/0; RB llm/0/0/0<llm/0/1/0; B llm/0/0/0; \
F llm/0/0/1; SF llm/0/0/1>llm/0/1/1; RB llm/0/0/1<llm/0/1/1; B llm/0/0/1; RG llm/0/0
lane 1: RF llm/0/1/0<llm/0/0/0; F llm/0/1/0; B llm/0/1/0; SB llm/0/1/0>llm/0/0/0; \
RF llm/0/1/1<llm/0/0/1; F llm/0/1/1; B llm/0/1/1; SB llm/0/1/1>llm/0/0/1; RG llm/0/1
"""
ON_BOTH = """\
lane 0: F vision/0/0/0; F audio/0/0/0; {F vision/0/0/1{0:5} @0} F llm/0/0/0; F vision/0/0/1{5:58}; F llm/0/0/1
lane 1: F vision/0/0/0; {F vision/0/0/1{0:5} @0} F llm/0/0/0; F audio/1/0/0; F vision/0/0/1{5:58}; F llm/0/0/1
"""
UPSTREAM = """\
lane 0: F vision/0/0/0; {F vision/0/0/1 @0} F llm/0/0/0; F llm/0/0/1; F vision/0/0/2; F llm/0/0/2
lane 1: F vision/0/1/0; F llm/0/0/0; F vision/0/1/1; F llm/0/0/1; F vision/0/1/2; F llm/0/0/2
"""


def check(text: str, shape: StepShape, options: RunOptions | None = None, *, lowered: bool = False) -> None:
    try:
        validate_schedule(schedule_from_text(text, shape, lowered=lowered), options=options)
    except ScheduleError as problem:
        raise ScheduleError(str(problem).partition("\n")[0]) from None


def rewritten(
    text: str, shape: StepShape, options: RunOptions | None = None, *, lowered: bool = False
) -> tuple[Any, Callable[[Any], None]]:
    def read(given: Any) -> None:
        check(text.replace(given["now"], given["then"]), shape, options, lowered=lowered)

    return {"now": "F", "then": "F"}, read


def shared_ranks(**replicas: int) -> StepShape:
    """Encoders and an LLM on the same two ranks: of so many replicas, or all over both."""
    sizes = {unit: (dp, 1, 2 // dp) for unit, dp in replicas.items()}
    groupings = {unit: deal(2, dp) for unit, dp in replicas.items()}
    return build_case(build_graph(*[*replicas][:-1]), sizes, groupings, colocated=True)


CROSSED = golden_cases()["crossed_groupings"]
TWO_REPLICAS = shared_ranks(vision=2, llm=2)
SCHEDULES: Kinds = {
    "schedule": ({"vision": VISION, "llm": LLM}, lambda given: check(f"{given['vision']}\n{given['llm']}", small())),
    "ranges": rewritten(RANGES, small()),
    "inside": rewritten(TOGETHER, beside(), LOCAL),
    "inside on both ranks": rewritten(ON_BOTH, replace(shared_ranks(vision=1, audio=2, llm=1), forward_only=True), LOCAL),
    "inside beside other ranks": rewritten(APART, apart(), LOCAL),
    "inside of two stages": rewritten(UPSTREAM, replace(beside(encoder=(1, 2, 1)), forward_only=True), LOCAL),
    "subsets of samples": rewritten(SUBSETS, deferred()),
    "reduction by layer": rewritten(BY_LAYER, llm(dp=1, num_microbatches=1)),
    "messages": rewritten(schedule_to_text(insert_communication(BUILDERS["1f1b"](CROSSED))), CROSSED, lowered=True),
    "messages of two stages": rewritten(STAGES, one_unit(2, 2), lowered=True),
    "reductions of two replicas": rewritten(schedule_to_text(BUILDERS["gpipe"](TWO_REPLICAS)), TWO_REPLICAS),
}
test_every_schedule_is_answered_as_written = golden_test("wrong_schedules.txt", SCHEDULES)
