"""Passes: text before and after, and what a simulated step gains."""

import re
from dataclasses import dataclass

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.move_actions import duration_of
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, LayerRange
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.schedule_text import schedule_from_text, schedule_to_text
from tests.unit.schedule.uniform_costs import UniformCosts


def deferred() -> StepShape:
    """Entrain's case: sample 1 of the encoder's first microbatch runs in the LLM's second one."""
    return build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0, 1], [2]]], "llm": [[[0], [1, 2]]]}
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
    lines = ["lane 0: " + eager("llm/0/0", 5), "lane 1: " + eager("llm/0/1", 4), "lane 2: " + eager("llm/0/2", 1)]
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


def llm(*, dp: int = 2, pp: int = 1, num_microbatches: int = 2, **layout: int) -> StepShape:
    groupings = {"llm": deal(num_microbatches * dp, dp)}
    return build_case(build_graph(), {"llm": (dp, pp, 1)}, groupings, layouts={"llm": layout})


def rewrite(case: StepShape, text: str) -> list[str]:
    after = reduce_by_layer(schedule_from_text(text, case))
    validate_schedule(after)
    assert schedule_from_text(schedule_to_text(after), case) == after
    return schedule_to_text(after).splitlines()


def test_the_first_part_stands_before_the_last_backward() -> None:
    before = (
        "lane 0: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0\n"
        "lane 1: F llm/1/0/0; F llm/1/0/1; B llm/1/0/0; B llm/1/0/1; RG llm/1/0"
    )
    assert rewrite(llm(), before) == [
        "lane 0: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; RG llm/0/0[1:10]; B llm/0/0/1; RG llm/0/0[0:1]",
        "lane 1: F llm/1/0/0; F llm/1/0/1; B llm/1/0/0; RG llm/1/0[1:10]; B llm/1/0/1; RG llm/1/0[0:1]",
    ]


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("F llm/0/0/0; F llm/0/0/1; B llm/0/0/1; B llm/0/0/0; RG llm/0/0", "microbatches end in another order"),
        ("F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; I llm/0/0/1; W llm/0/0/1; RG llm/0/0", "weight gradients come apart"),
    ],
)
def test_where_one_replica_cannot_all_stay_whole(first: str, why: str) -> None:
    other = "F llm/1/0/0; F llm/1/0/1; B llm/1/0/0; B llm/1/0/1; RG llm/1/0"
    schedule = schedule_from_text(f"lane 0: {first}\nlane 1: {other}", llm())
    assert reduce_by_layer(schedule) == schedule, why


def test_a_reduction_behind_another_one_stays_whole() -> None:
    case = llm(chunks=2)
    text = "; ".join(
        [
            *(f"F llm/{{replica}}/{stage}/{microbatch}" for stage in range(2) for microbatch in range(2)),
            *(f"B llm/{{replica}}/{stage}/{microbatch}" for microbatch in range(2) for stage in (1, 0)),
            "RG llm/{replica}/1",
            "RG llm/{replica}/0",
        ]
    )
    lines = [f"lane {replica}: {text.format(replica=replica)}" for replica in range(2)]
    assert rewrite(case, "\n".join(lines)) == lines


def test_fillers_stay_what_they_are() -> None:
    case = llm(dp=1, num_microbatches=1, chunks=2)
    schedule = schedule_from_text(
        "lane 0: F llm/0/0/0; F llm/0/1/0; I llm/0/1/0; {W llm/0/1/0} B llm/0/0/0; RG llm/0/1; RG llm/0/0", case
    )
    after = reduce_by_layer(schedule)
    assert after == schedule
    text = "lane 0: F llm/0/0/0; F llm/0/1/0; B llm/0/1/0; RG llm/0/1; I llm/0/0/0; W llm/0/0/0; RG llm/0/0"
    cut = schedule_to_text(reduce_by_layer(schedule_from_text(text, case)))
    assert "RG llm/0/1[1:5]; B llm/0/1/0; RG llm/0/1[0:1]; I llm/0/0/0" in cut


def test_later_passes_see_whole_reductions_and_leave_cut_ones() -> None:
    """Entrain's case: the encoder's last backward is cut in two, and the reduction has to begin with the second half."""
    groupings = {"vision": [[[0, 1]]], "llm": [[[0], [1]]]}
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, groupings)
    schedule = reduce_by_layer(BUILDERS["gpipe"](case))
    assert schedule_to_text(schedule).startswith(
        "lane 0: F vision/0/0/0; RG vision/0/0[1:10]; B vision/0/0/0; RG vision/0/0[0:1]"
    )
    after = PASSES["split-backward"](schedule)
    validate_schedule(after)
    assert schedule_to_text(after).startswith(
        "lane 0: F vision/0/0/0; B vision/0/0/0#0; RG vision/0/0[1:10]; B vision/0/0/0#1; RG vision/0/0[0:1]"
    )


def test_half_a_reduction_is_refused() -> None:
    case = llm(dp=1, num_microbatches=1)
    for text, problem in (
        ("F llm/0/0/0; RG llm/0/0[1:10]; B llm/0/0/0", "RG llm/0/0[0:1]: missing"),
        ("F llm/0/0/0; B llm/0/0/0; RG llm/0/0[0:1]; RG llm/0/0[1:10]", "RG llm/0/0[0:1]: wrong order"),
        ("F llm/0/0/0; RG llm/0/0[1:10]; B llm/0/0/0; RG llm/0/0", "RG llm/0/0: unknown action"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(problem)):
            schedule = schedule_from_text(f"lane 0: {text}", case)
            validate_schedule(schedule)


@dataclass(frozen=True)
class ReductionCosts(UniformCosts):
    """A reduction of four layers."""

    whole: float = 1.0

    def collective_seconds(self, action: Action) -> float:
        assert action.kind is ActionKind.REDUCE_GRADIENTS
        return self.whole * (1.0 if action.covers is None else 0.25 if action.covers == LayerRange(0, 1) else 0.75)


@pytest.mark.parametrize("whole", [0.4, 2.0, 8.0])
def test_a_cut_reduction_hides_behind_the_last_backward(whole: float) -> None:
    """With F = 1 and B = 2: what is not hidden is the last layer, or what takes longer than the backward."""
    case = llm(dp=3, num_microbatches=4)
    costs = ReductionCosts(forward=1.0, backward=2.0, whole=whole)

    def seconds(*, by_layer: bool) -> float:
        schedule = BUILDERS["1f1b"](case)
        if by_layer:
            schedule = reduce_by_layer(schedule)
        lowered = insert_communication(schedule)
        return simulate_schedule(lowered, costs).iteration_seconds

    assert seconds(by_layer=False) == pytest.approx(12 + whole)
    assert seconds(by_layer=True) == pytest.approx(12 + max(0.25 * whole, whole - 2))
