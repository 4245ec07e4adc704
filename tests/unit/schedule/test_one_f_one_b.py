from pathlib import Path

import pytest

from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b, forward_limits
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal

EXAMPLES = Path(__file__).parents[3] / "examples"


def textbook(num_stages: int, num_microbatches: int, stage: int) -> list[tuple[str, int]]:
    """The order that torch.distributed.pipelining gives: warm-up forwards, one of each in turn, the remaining backwards."""
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    order = [("F", microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches - num_warmup):
        order += [("F", num_warmup + microbatch), ("B", microbatch)]
    return order + [("B", microbatch) for microbatch in range(num_microbatches - num_warmup, num_microbatches)]


def test_a_chain_of_encoder_and_llm_is_one_pipeline() -> None:
    case = build_case(build_graph("vision"), {"vision": (1, 2, 1), "llm": (1, 3, 1)}, {"vision": deal(9, 1), "llm": deal(9, 1)})
    assert list(forward_limits(case).values()) == [3, 2, 1, 5, 4]
    for stage, lane in enumerate(build_one_f_one_b(case).lanes):
        assert [(action.kind.value, action.microbatch) for action in lane.actions[:-1]] == textbook(5, 9, stage)


FROZEN = {
    "encoder": {"frozen": ["vision"], "frozen_projectors": ["vision"]},
    "all but the projector": {"frozen": ["vision", "llm"]},
    "llm": {"frozen": ["llm"]},
    "encoder's body": {"frozen": ["vision"]},
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("builder", ["1f1b", "interleaved-1f1b", "dip"])
def test_what_is_frozen_does_not_change_the_order_of_a_lane(frozen: str, builder: str) -> None:
    """Stage s of S + P keeps its warm-up of S + P - s - 1 forwards and its turns, however short its backwards are."""
    groupings = {"vision": deal(12, 1), "llm": deal(12, 1)}
    case = build_case(build_graph("vision", **FROZEN[frozen]), {"vision": (1, 2, 1), "llm": (1, 4, 1)}, groupings)
    lanes = BUILDERS[builder](case).lanes
    for stage in range(2, 6) if builder == "dip" else range(6):
        found = [(action.kind.value, action.microbatch) for action in lanes[stage].actions if action.microbatch >= 0]
        has_backward = any(kind == "B" for kind, _ in found)
        assert found == [step for step in textbook(6, 12, stage) if has_backward or step[0] == "F"]


def test_a_frozen_model_of_published_stage_times_is_as_fast_as_without_a_weight_gradient_to_move() -> None:
    """Cornstarch, Table 3: with frozen weights there is nothing to fill with, so ZB-H1 is 1F1B."""
    table = CostTable.from_file(EXAMPLES / "costs" / "cornstarch-vlm-m.yaml")
    case = build_table_step(table)[0]
    seconds = {}
    for builder in ("1f1b", "interleaved-1f1b", "encoders-colocated", "zb-h1"):
        schedule = build_schedule(BUILDERS[builder], case)
        simulation = simulate_schedule(schedule, TableCosts(table))
        seconds[builder] = simulation.iteration_seconds
    busiest = 24 * (0.02815 + 0.0513)
    fill = 2 * 0.07504 + 3 * 0.02815 + 3 * 0.0513
    assert list(seconds.values()) == pytest.approx([busiest + fill] * 4, rel=1e-3)


def test_a_starved_stage_waits_for_its_turn() -> None:
    """One encoder replica feeds two LLM replicas: their lanes are idle half of the time, and alternate all the same."""
    groupings = {"vision": deal(12, 1), "llm": deal(12, 2)}
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (2, 2, 1)}, groupings)
    lanes = build_one_f_one_b(case).lanes
    for lane, stage in ((1, 0), (2, 1), (3, 0), (4, 1)):
        assert [(action.kind.value, action.microbatch) for action in lanes[lane].actions[:-1]] == textbook(2, 6, stage)


def test_one_lane_keeps_one_microbatch() -> None:
    """There is no pipeline to keep full, so nothing is kept in flight for it."""
    groupings = {"vision": deal(3, 1), "llm": deal(3, 1)}
    case = build_case(build_graph("vision"), {"vision": (1, 1, 1), "llm": (1, 1, 1)}, groupings, colocated=True)
    (lane,) = build_one_f_one_b(case).lanes
    assert [action.microbatch for action in lane.actions if action.microbatch >= 0] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("vision", "llm", "limits"),
    [
        (deal(8, 2), deal(8, 1), [2, 2]),  # every second LLM microbatch: 1 for its own stage, 1 of the 2 in flight
        ([[[0], [1], [2], [3]], [[4], [5], [6], [7]]], deal(8, 1), [3, 3]),  # in turns, so each serves both in flight
        (deal(8, 1), deal(8, 2), [5]),  # two LLM replicas of two in flight each
        ([[[0, 1, 2, 3], [4, 5, 6, 7]]], deal(8, 1), [3]),  # large microbatches: two overlap at the seam
        ([[[7], [6], [5], [4], [3], [2], [1], [0]]], deal(8, 1), [9]),  # reversed: all are needed first
    ],
)
def test_encoder_limits_follow_the_routes(vision: list[list[list[int]]], llm: list[list[list[int]]], limits: list[int]) -> None:
    sizes = {"vision": (len(vision), 1, 1), "llm": (len(llm), 2, 1)}
    found = forward_limits(build_case(build_graph("vision"), sizes, {"vision": vision, "llm": llm}))
    assert [found["vision", replica, 0] for replica in range(len(vision))] == limits


def test_a_frozen_encoder_that_shares_a_lane_stays_two_microbatches_ahead() -> None:
    graph = build_graph("vision", frozen=["vision"], frozen_projectors=["vision"])
    groupings = {"vision": deal(12, 1), "llm": deal(12, 1)}
    case = build_case(graph, {"vision": (1, 1, 1), "llm": (1, 6, 1)}, groupings, colocated=True)
    assert forward_limits(case)["vision", 0, 0] == 2
    ahead, most = 0, 0
    for action in build_one_f_one_b(case).lanes[0].actions:
        if action.kind is ActionKind.FORWARD:
            ahead += 1 if action.unit == "vision" else -1
            most = max(most, ahead)
    assert most == 2
