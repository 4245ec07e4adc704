import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b, forward_limits
from multimodal.schedule.unit_cost_timeline import timeline_of_unit_costs
from multimodal.values.schedule import ActionKind
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal


def textbook(num_stages: int, num_microbatches: int, stage: int) -> list[tuple[str, int]]:
    """The order that torch.distributed.pipelining gives: warm-up forwards, one of each in turn, the remaining backwards."""
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    order = [("F", microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches - num_warmup):
        order += [("F", num_warmup + microbatch), ("B", microbatch)]
    return order + [("B", microbatch) for microbatch in range(num_microbatches - num_warmup, num_microbatches)]


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7, 8, 9, 20])
def test_one_unit_gives_textbook_1f1b(num_stages: int, num_microbatches: int) -> None:
    case = build_case(build_graph(), {"llm": (1, num_stages, 1)}, {"llm": deal(num_microbatches, 1)})
    for stage, lane in enumerate(build_one_f_one_b(*case).lanes):
        found = [(action.kind.value, action.microbatch) for action in lane.actions]
        assert found == [*textbook(num_stages, num_microbatches, stage), ("RG", -1)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize("builder", ["gpipe", "1f1b", "eager-1f1b", "dip", "encoders-colocated"])
def test_one_unit_takes_the_closed_form_time(num_stages: int, num_microbatches: int, builder: str) -> None:
    graph, plan, assignment = build_case(build_graph(), {"llm": (1, num_stages, 1)}, {"llm": deal(num_microbatches, 1)})
    schedule = BUILDERS[builder](graph, plan, assignment)
    timeline = timeline_of_unit_costs(schedule, graph=graph, plan=plan, assignment=assignment)
    reduction = 1
    assert timeline.duration_seconds == (num_microbatches + num_stages - 1) * (1 + 2) + reduction


def test_a_chain_of_encoder_and_llm_is_one_pipeline() -> None:
    case = build_case(build_graph("vision"), {"vision": (1, 2, 1), "llm": (1, 3, 1)}, {"vision": deal(9, 1), "llm": deal(9, 1)})
    assert list(forward_limits(*case).values()) == [3, 2, 1, 5, 4]
    for stage, lane in enumerate(build_one_f_one_b(*case).lanes):
        assert [(action.kind.value, action.microbatch) for action in lane.actions[:-1]] == textbook(5, 9, stage)


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
    found = forward_limits(*build_case(build_graph("vision"), sizes, {"vision": vision, "llm": llm}))
    assert [found["vision", replica, 0] for replica in range(len(vision))] == limits


def test_a_frozen_encoder_that_shares_a_lane_stays_two_microbatches_ahead() -> None:
    graph = build_graph("vision", frozen=["vision"], frozen_projectors=["vision"])
    groupings = {"vision": deal(12, 1), "llm": deal(12, 1)}
    case = build_case(graph, {"vision": (1, 1, 1), "llm": (1, 6, 1)}, groupings, colocated=True)
    assert forward_limits(*case)["vision", 0, 0] == 2
    ahead, most = 0, 0
    for action in build_one_f_one_b(*case).lanes[0].actions:
        if action.kind is ActionKind.FORWARD:
            ahead += 1 if action.unit == "vision" else -1
            most = max(most, ahead)
    assert most == 2
