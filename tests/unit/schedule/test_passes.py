"""Passes: text before and after."""

import pytest

from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.move_actions import duration_of
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import ActionKind
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def deferred() -> StepShape:
    """Entrain's case: sample 1 of the encoder's first microbatch runs in the LLM's second one."""
    return build_case(
        build_graph("vision"),
        {"vision": (1, 1, 1), "llm": (1, 1, 1)},
        {"vision": [[[0, 1], [2]]], "llm": [[[0], [1, 2]]]},
    )


def run(name: str, case: StepShape, text: str) -> list[str]:
    schedule = PASSES[name](schedule_from_text(text, case))
    check(schedule)
    return schedule_to_text(schedule).splitlines()


def check(schedule: Schedule) -> None:
    """Both dialects are valid: no action is lost, none stands twice, and nothing waits in a circle."""
    validate_schedule(schedule)
    validate_schedule(insert_communication(schedule))


def test_split_backward_runs_a_subset_as_soon_as_its_gradient_is_there() -> None:
    before = (
        "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0; B vision/0/0/1; RG vision/0/0\n"
        "lane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"
    )
    assert run("split-backward", deferred(), before) == [
        "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0#0; B vision/0/0/0#1; B vision/0/0/1; RG vision/0/0",
        "lane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0",
    ]


def test_a_missing_sample_subset_is_refused() -> None:
    text = (
        "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0#0; B vision/0/0/1; RG vision/0/0\n"
        "lane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"
    )
    with pytest.raises(ScheduleError, match="B vision/0/0/0#0: missing subset: its microbatch has 2 sample subsets"):
        schedule_from_text(text, deferred())


def test_fill_puts_weight_gradients_into_receive_waits() -> None:
    case = build_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(2, 1)})
    before = (
        "lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; B llm/0/0/1; RG llm/0/0\n"
        "lane 1: F llm/0/1/0; B llm/0/1/0; F llm/0/1/1; B llm/0/1/1; RG llm/0/1"
    )
    # The first stage has weight gradients only, so its backward is not split; the last backward waits for nothing.
    assert run("fill", case, before) == [
        "lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; B llm/0/0/1; RG llm/0/0",
        "lane 1: F llm/0/1/0; I llm/0/1/0; {W llm/0/1/0} F llm/0/1/1; B llm/0/1/1; RG llm/0/1",
    ]


def test_defer_receives_runs_what_is_ready_while_a_message_is_on_its_way() -> None:
    case = build_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(2, 1)})
    before = (
        "lane 0: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0\n"
        "lane 1: F llm/0/1/0; B llm/0/1/0; F llm/0/1/1; B llm/0/1/1; RG llm/0/1"
    )
    after = run("defer-receives", case, before)
    assert after[0] == "lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; B llm/0/0/1; RG llm/0/0"


def test_delay_forward_shortens_the_warm_up_of_an_eager_schedule_and_keeps_its_length() -> None:
    case = build_case(build_graph(), {"llm": (1, 3, 1)}, {"llm": deal(6, 1)})
    lines = [
        "lane 0: " + eager("llm/0/0", 5),
        "lane 1: " + eager("llm/0/1", 4),
        "lane 2: " + eager("llm/0/2", 1),
    ]
    after = schedule_from_text("\n".join(run("delay-forward", case, "\n".join(lines))), case)
    lengths = [duration_of(schedule) for schedule in (schedule_from_text("\n".join(lines), case), after)]
    assert lengths[1] == lengths[0]
    assert [warm_up(after, lane) for lane in range(3)] == [3, 2, 1]


def eager(stage: str, num_warm_up: int) -> str:
    actions = [f"F {stage}/{microbatch}" for microbatch in range(num_warm_up)]
    for microbatch in range(6):
        actions.append(f"B {stage}/{microbatch}")
        if num_warm_up + microbatch < 6:
            actions.append(f"F {stage}/{num_warm_up + microbatch}")
    return "; ".join([*actions, f"RG {stage}"])


def warm_up(schedule: Schedule, lane: int) -> int:
    kinds = [action.kind for action in schedule.lanes[lane].actions]
    return kinds.index(ActionKind.BACKWARD)
