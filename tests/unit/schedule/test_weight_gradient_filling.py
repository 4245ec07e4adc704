"""Weight gradients and forwards ahead in the idle time of pipelines: what a step takes, and what is kept within memory."""

import math
from dataclasses import replace

import pytest

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import FACTORS, MEMORY_SHARE, factors_within_memory, forward_limits
from multimodal.schedule.encoder_ranges import split_in_line, weights_before_forwards
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import GivenCosts, UniformCosts, built, costs_of, most_kept
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.schedule_text import schedule_to_text

HALVES = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


def test_backwards_in_two_stand_where_the_whole_stood() -> None:
    step = build_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(3, 1)})
    split = split_in_line(BUILDERS["1f1b"](step), ["llm"])
    assert schedule_to_text(split).replace("llm/0/", "").splitlines() == [
        "lane 0: F 0/0; F 0/1; I 0/0; W 0/0; F 0/2; I 0/1; W 0/1; I 0/2; W 0/2",
        "lane 1: F 1/0; I 1/0; W 1/0; F 1/1; I 1/1; W 1/1; F 1/2; I 1/2; W 1/2",
    ]
    actions = split.work.computed
    pairs = [
        (str(actions[first]), str(actions[then])) for then, first in zip(*weights_before_forwards(split, "llm"), strict=True)
    ]
    expected = [(Action(ActionKind.WEIGHT_GRADIENT, "llm", 0, s, 0), Action(ActionKind.FORWARD, "llm", 0, s, 2)) for s in (0, 1)]
    assert pairs == [tuple(map(str, pair)) for pair in expected]


def test_a_lane_keeps_to_its_own_order_where_a_stage_lies_in_several() -> None:
    """The LLM's one stage is in both lanes, behind another encoder replica in each."""
    sizes = {"vision": (2, 1, 1), "llm": (1, 1, 2)}
    step = build_case(build_graph("vision"), sizes, {"vision": deal(2, 2), "llm": deal(2, 1)}, colocated=True)
    split = split_in_line(BUILDERS["interleaved-1f1b"](step), ["vision", "llm"])
    actions = split.work.computed
    pairs = {(actions[first], actions[then]) for then, first in zip(*weights_before_forwards(split), strict=True)}
    expected = Action(ActionKind.WEIGHT_GRADIENT, "llm", 0, 0, 0), Action(ActionKind.FORWARD, "llm", 0, 0, 1)
    assert pairs == {expected}
    built("interleaved-zb", step, costs_of(llm=1.0, vision=1.0))  # validates


def unlike_ranges() -> StepShape:
    """Two replicas of an LLM of two ranges on each of four lanes, and 16 microbatches each."""
    return build_case(build_graph(), {"llm": (2, 4, 1)}, {"llm": deal(32, 2)}, layouts={"llm": {"chunks": 2}})


def unlike_costs(room: float = math.inf, **given: float) -> GivenCosts:
    """Ranges and microbatches take unlike times, and keep 10 bytes each; room: for these, beside 1,007 of the fullest lane."""

    def seconds(action: Action) -> float:
        stage, microbatch = action.stage, action.microbatch
        forward = 0.5 + (7 * microbatch**2 + 5 * stage**2 + 3 * microbatch * stage) % 11 / 4
        return forward * (2.0 if action.kind is ActionKind.BACKWARD else 1.0)

    return GivenCosts(seconds=seconds, memory_bytes=(1007 + room) / MEMORY_SHARE, **given)


def test_weight_gradients_fill_where_lanes_wait_for_longer_ranges() -> None:
    step, costs = unlike_ranges(), unlike_costs(collective=0.25)
    schedules = [built(name, step, costs) for name in ("interleaved-1f1b", "interleaved-zb")]
    plain, filled = (simulate_schedule(schedule, costs) for schedule in schedules)
    lanes = split_in_line(BUILDERS["interleaved-1f1b"](step), ()).lanes
    busy = max(sum(costs.compute(action).seconds for action in lane.actions) for lane in lanes)
    assert filled.iteration_seconds - busy < 0.3 * (plain.iteration_seconds - busy)
    for lane in schedules[1].lanes:
        for stage in {action.stage for action in lane.actions}:
            done = [action for action in lane.actions if action.stage == stage and action.kind in HALVES]
            assert len(done) == 32
            assert (done[-1].kind, done[-1].microbatch) == (ActionKind.WEIGHT_GRADIENT, 15), "gradients are reduced from then on"


def test_weight_gradients_wait_no_longer_than_memory_allows() -> None:
    step = unlike_ranges()
    most = max(most_kept(BUILDERS["interleaved-1f1b"](step)))
    kept, seconds = [], []
    for num_more in (0, 1, 4, 64):
        costs = unlike_costs(10 * (most + num_more))
        schedule = built("interleaved-zb", step, costs)
        kept.append(max(most_kept(schedule)) - most)
        seconds.append(simulate_schedule(schedule, costs).iteration_seconds)
    assert kept == [0, 1, 4, 8]
    assert seconds == sorted(set(seconds), reverse=True)


def memory_costs(room: float, *, grows: bool = False) -> GivenCosts:
    """Microbatch k keeps a byte in every stage, or k + 1; weights take 100."""
    unlike = costs_of(llm=1.0, vision=1.0)
    memory_bytes = (100 + room + 1e-6) / MEMORY_SHARE
    return replace(unlike, kept=lambda place: place.microbatch * grows + 1, static=100, memory_bytes=memory_bytes)


def llm_step() -> StepShape:
    return build_case(build_graph(), {"llm": (1, 4, 1)}, {"llm": deal(8, 1)})


@pytest.mark.parametrize(
    ("room", "factor"),
    [
        # 1F1B's first stage keeps 4 of 8 microbatches with 1 to 8 bytes each; the largest 4 to 8 are 26, 30, 33, 35 and 36.
        (25, 1.0),
        (26, 1.0),
        (30, 1.25),
        (33, 1.5),
        (35, 1.75),
        (36, 4.0),
    ],
)
def test_the_largest_microbatches_fit_beside_the_weights(room: int, factor: float) -> None:
    step = llm_step()
    found = factors_within_memory(step, forward_limits(step), costs=memory_costs(room, grows=True))
    assert list(found.values()) == [factor] * 4


def test_memory_that_is_not_known_limits_nothing() -> None:
    step = llm_step()
    assert set(factors_within_memory(step, forward_limits(step), costs=UniformCosts()).values()) == {FACTORS[-1]}


def test_a_lane_holds_what_all_its_stages_keep_and_its_pipeline_goes_by_it() -> None:
    """Each replica of the LLM has two ranks, and the encoder shares the first of the first replica."""
    case = build_case(
        build_graph("vision"),
        {"vision": (1, 1, 1), "llm": (2, 2, 1)},
        {"vision": [[[0], [1], [2]]], "llm": [[[0], [1], [2]], [[3], [4], [5]]]},
        colocated=True,
    )
    found = factors_within_memory(case, dict.fromkeys(case.stages, 1), costs=memory_costs(3))
    assert found == {
        ("vision", 0, 0): 1.75,  # two microbatches of each would be four
        ("llm", 0, 0): 1.75,
        ("llm", 0, 1): 1.75,
        ("llm", 1, 0): 4.0,  # all of them
        ("llm", 1, 1): 4.0,
    }


def deferring_step(num_microbatches: int = 8) -> StepShape:
    """Every second encoder microbatch hands one of its two samples to the LLM's next microbatch (Entrain's deferral)."""
    samples = [[2 * index, 2 * index + 1] for index in range(num_microbatches)]
    llm = [list(each) for each in samples]
    for first in range(0, num_microbatches, 2):
        llm[first + 1].append(llm[first].pop())
    return build_case(build_graph("vision"), {"vision": (1, 2, 1), "llm": (1, 2, 1)}, {"vision": [samples], "llm": [llm]})


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("builder", ["eager-1f1b-memory", "zb-memory"])
@pytest.mark.parametrize("room", [0, 5, 7, 10])
def test_what_is_kept_fits_where_1f1b_would(builder: str, room: int, splits: bool) -> None:
    step, passes = deferring_step(), (split_backward,) if splits else ()
    costs = memory_costs(room)
    schedule = build_schedule(BUILDERS[builder].with_costs(costs), step, passes=passes, costs=costs)
    kept = simulate_schedule(schedule, costs).peak_memory_bytes - 100
    assert kept <= max(room, max(forward_limits(step).values()))


@pytest.mark.parametrize(("builder", "plain"), [("eager-1f1b-memory", "1f1b"), ("zb-memory", "zb-h1")])
def test_without_room_it_stores_no_more_and_with_room_it_is_no_slower(builder: str, plain: str) -> None:
    step = deferring_step(16)
    seconds = {}
    for name, row, room in (("plain", plain, 0), ("full", builder, 0), ("roomy", builder, 100)):
        costs = memory_costs(room)
        schedule = build_schedule(BUILDERS[row].with_costs(costs), step, costs=costs)
        seconds[name] = simulate_schedule(schedule, costs).iteration_seconds
    assert seconds["full"] == seconds["plain"]
    assert seconds["roomy"] <= seconds["plain"]
    assert seconds["roomy"] < seconds["plain"] or builder != "zb-memory"
