"""Passes: text before and after, and properties on random cases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.lane_times import duration_of
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.passes.reorder import reorder
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import ActionKind, Schedule
from tests.unit.schedule.schedule_cases import Case, build_case, build_graph, cases, deal


def deferred() -> Case:
    """Entrain's case: sample 1 of the encoder's first microbatch runs in the LLM's second one."""
    return build_case(
        build_graph("vision"),
        {"vision": (1, 1, 1), "llm": (1, 1, 1)},
        {"vision": [[[0, 1], [2]]], "llm": [[[0], [1, 2]]]},
    )


def run(name: str, case: Case, text: str) -> list[str]:
    graph, plan, assignment = case
    schedule = PASSES[name](schedule_from_text(text), graph=graph, plan=plan, assignment=assignment)
    check(case, schedule)
    return schedule_to_text(schedule).splitlines()


def check(case: Case, schedule: Schedule) -> None:
    graph, plan, assignment = case
    validate_schedule(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False)
    lowered = insert_communication(schedule, graph=graph, plan=plan, assignment=assignment)
    validate_schedule(lowered, graph=graph, plan=plan, assignment=assignment, lowered=True)
    assert schedule_from_text(schedule_to_text(lowered)) == lowered


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
    graph, plan, assignment = deferred()
    schedule = schedule_from_text(
        "lane 0: F vision/0/0/0; F vision/0/0/1; B vision/0/0/0#0; B vision/0/0/1; RG vision/0/0\n"
        "lane 1: F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"
    )
    with pytest.raises(ScheduleError, match="B vision/0/0/0#0: missing part: its microbatch has 2 sample subsets"):
        validate_schedule(schedule, graph=graph, plan=plan, assignment=assignment, lowered=False)


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
    graph, plan, assignment = case
    lines = [
        "lane 0: " + eager("llm/0/0", 5),
        "lane 1: " + eager("llm/0/1", 4),
        "lane 2: " + eager("llm/0/2", 1),
    ]
    after = schedule_from_text("\n".join(run("delay-forward", case, "\n".join(lines))))
    lengths = [
        duration_of(schedule, graph=graph, plan=plan, assignment=assignment)
        for schedule in (schedule_from_text("\n".join(lines)), after)
    ]
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


def test_reorder_moves_a_microbatch_in_all_lanes() -> None:
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": deal(3, 1), "llm": deal(3, 1)})
    graph, plan, assignment = case
    schedule = BUILDERS["1f1b"](*case)
    order = {("vision", 0): (2, 0, 1), ("llm", 0): (2, 0, 1)}
    moved = reorder(schedule, graph=graph, plan=plan, assignment=assignment, order=order)
    check(case, moved)
    assert [action.microbatch for action in moved.lanes[1].actions if action.kind is ActionKind.FORWARD] == [2, 0, 1]
    with pytest.raises(ScheduleError, match="must name each of its 3 microbatches once"):
        reorder(schedule, graph=graph, plan=plan, assignment=assignment, order={("llm", 0): (0, 0, 1)})


@settings(max_examples=80)
@given(
    case=cases(),
    builder=st.sampled_from(["gpipe", "1f1b"]),
    names=st.lists(st.sampled_from(sorted(PASSES)), min_size=1, max_size=3, unique=True),
)
def test_passes_in_any_order_keep_a_schedule_valid_and_never_make_it_longer(case: Case, builder: str, names: list[str]) -> None:
    graph, plan, assignment = case
    schedule = BUILDERS[builder](*case)
    length = duration_of(schedule, graph=graph, plan=plan, assignment=assignment)
    for name in names:
        schedule = PASSES[name](schedule, graph=graph, plan=plan, assignment=assignment)
        check(case, schedule)
        after = duration_of(schedule, graph=graph, plan=plan, assignment=assignment)
        assert length is not None and after is not None
        # A reduction in two parts takes twice the time under unit costs, and more of them can be cut after these two.
        if name in ("defer-receives", "delay-forward") and "reduce-by-layer" not in names:
            assert after <= length
        length = after
