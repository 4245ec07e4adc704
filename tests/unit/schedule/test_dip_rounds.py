"""DIP in rounds: what a lane keeps, and that every assignment has an order."""

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.dip import build_dip
from multimodal.values.action import ActionKind
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def one_lane(num_samples: int) -> StepShape:
    groups = deal(num_samples, 1)
    return build_case(
        build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, {"vision": groups, "llm": groups}, colocated=True
    )


def most_open(case: StepShape, num_rounds: int) -> int:
    """Encoder microbatches between forward and backward."""
    open_now = most = 0
    for action in build_dip(case, num_rounds=num_rounds).lanes[0].actions:
        if action.unit == "vision":
            open_now += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            most = max(most, open_now)
    return most


def test_an_encoder_keeps_one_rounds_microbatches() -> None:
    case = one_lane(8)
    assert [most_open(case, rounds) for rounds in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert most_open(one_lane(7), 2) == 4


def test_one_round_is_dip_and_names_say_how_many() -> None:
    case = one_lane(4)
    assert build_dip(case, num_rounds=1) == BUILDERS["dip"](case)
    for name in ("dip-4", "dip:rounds=4"):
        assert BUILDERS[name](case) == build_dip(case, num_rounds=4)
