from dataclasses import replace

import pytest

from multimodal.schedule.text import lanes_from_text
from multimodal.values.action import Action, ActionKind, action_to_text
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal, golden_cases


def parse(text: str) -> Action:
    return lanes_from_text(f"lane 0: {text}")[0].actions[0]


def needs(case: StepShape, text: str, *, lowered: bool = False) -> list[str]:
    return [action_to_text(action) for action in step_work(case).needs_of(parse(text), lowered=lowered)]


def unequal() -> StepShape:
    """One encoder with items of samples 0 1 | 2 3 | 4 before two LLM replicas with samples 0 | 1 | 2 and 3 4."""
    return golden_cases()["encoder_dp1_llm_dp2_unequal"]


@pytest.mark.parametrize(
    ("action", "compute", "lowered"),
    [
        ("F vision/0/0/1", [], []),
        ("F llm/0/0/1", ["F vision/0/0/0"], ["RF llm/0/0/1<vision/0/0/0"]),
        (
            "F llm/1/0/0",
            ["F vision/0/0/1", "F vision/0/0/2"],
            ["RF llm/1/0/0<vision/0/0/1", "RF llm/1/0/0<vision/0/0/2"],
        ),
        ("B llm/1/0/0", ["F llm/1/0/0"], ["F llm/1/0/0"]),
        (
            "B vision/0/0/1",
            ["F vision/0/0/1", "B llm/0/0/2", "B llm/1/0/0"],
            ["F vision/0/0/1", "RB vision/0/0/1<llm/0/0/2", "RB vision/0/0/1<llm/1/0/0"],
        ),
        ("RG llm/0/0", ["B llm/0/0/0", "B llm/0/0/1", "B llm/0/0/2"], ["B llm/0/0/0", "B llm/0/0/1", "B llm/0/0/2"]),
        ("SF vision/0/0/0>llm/0/0/1", None, ["F vision/0/0/0"]),
        ("RF llm/0/0/1<vision/0/0/0", None, ["SF vision/0/0/0>llm/0/0/1"]),
        ("SB llm/0/0/1>vision/0/0/0", None, ["B llm/0/0/1"]),
        ("RB vision/0/0/0<llm/0/0/1", None, ["SB llm/0/0/1>vision/0/0/0"]),
    ],
)
def test_dependencies_across_units(action: str, compute: list[str] | None, lowered: list[str]) -> None:
    assert compute is None or needs(unequal(), action) == compute, "only the lowered dialect has messages"
    assert needs(unequal(), action, lowered=True) == lowered


@pytest.mark.parametrize(
    ("frozen", "frozen_projectors", "with_backward", "with_reduction"),
    [
        ([], [], {"vision 0", "vision 1", "llm 0"}, {"vision 0", "vision 1", "llm 0"}),
        (["vision"], [], {"vision 1", "llm 0"}, {"vision 1", "llm 0"}),
        (["vision"], ["vision"], {"llm 0"}, {"llm 0"}),
        (["llm"], [], {"vision 0", "vision 1", "llm 0"}, {"vision 0", "vision 1"}),
        (["vision", "llm"], [], {"vision 1", "llm 0"}, {"vision 1"}),
        (["vision", "llm"], ["vision"], set(), set()),
    ],
)
def test_backwards_and_reductions_exist_where_something_is_trained(
    frozen: list[str], frozen_projectors: list[str], with_backward: set[str], with_reduction: set[str]
) -> None:
    graph = build_graph("vision", frozen=frozen, frozen_projectors=frozen_projectors)
    case = build_case(graph, {"vision": (1, 2, 1), "llm": (1, 1, 1)}, {"vision": deal(2, 1), "llm": deal(2, 1)})
    actions = step_work(case).computed
    stages = {kind: {f"{a.unit} {a.stage}" for a in actions if a.kind is kind} for kind in ActionKind}
    assert stages[ActionKind.FORWARD] == {"vision 0", "vision 1", "llm 0"}
    assert stages[ActionKind.BACKWARD] == with_backward
    assert stages[ActionKind.REDUCE_GRADIENTS] == with_reduction


def test_a_replica_without_microbatches_still_reduces() -> None:
    case = build_case(build_graph("vision"), {"vision": (2, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0]], []], "llm": [[[0]]]})
    assert [action_to_text(action) for action in step_work(case).computed if action[1:3] == ("vision", 1)] == ["RG vision/1/0"]


def test_forward_only_has_forwards_only() -> None:
    step = replace(unequal(), forward_only=True)
    assert {action.kind for action in step_work(step).computed} == {ActionKind.FORWARD}
    assert {action.kind for action in step_work(step).actions} == {
        ActionKind.FORWARD,
        ActionKind.SEND_FORWARD,
        ActionKind.RECEIVE_FORWARD,
    }
