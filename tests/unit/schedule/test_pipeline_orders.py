"""Orders of pipelines: those of torch, closed forms of papers, chains of several units, and the least that a step can take."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multimodal.schedule.build_schedule as building
import multimodal.schedule.list_schedule as listing
from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, chain_of_replica
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b, forward_limits
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import ActionKind
from multimodal.values.schedule import Lane
from multimodal.values.shape import StepShape
from tests.unit.schedule.built_schedules import most_kept
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal, one_unit, written_case


@pytest.mark.parametrize("is_fast", [True, False])
def test_an_action_that_waits_for_none_that_is_scheduled_is_refused(is_fast):
    run = listing.kernels.link_actions if is_fast and listing.kernels else listing.link_actions
    needs, nothing = (np.array([0, 0, 1]), np.array([0])), np.zeros(0, np.int64)
    with pytest.raises(IndexError, match="not scheduled"):
        run(np.array([1]), *needs, np.zeros(1, np.uint8), np.zeros(1, np.int64), nothing, nothing)


schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SIZES = [(1, 2), (2, 1), (2, 5), (3, 3), (4, 2), (4, 12)]
LONG = [*SIZES, (8, 3), (8, 20)]
"""(stages, microbatches)."""


def build_lanes(builder: str, num_stages: int, num_microbatches: int, **layout: int) -> tuple[Lane, ...]:
    return BUILDERS[builder](one_unit(num_stages, num_microbatches, **layout)).lanes


def ours(lane: Lane) -> list[tuple[str, int, int]]:
    return [(action.kind.value, action.stage, action.microbatch) for action in lane.actions if action.microbatch >= 0]


def theirs(actions: list[Any]) -> list[tuple[str, int, int]]:
    """torch uses the same letters; None is an idle slot of its table, and its reduction has no microbatch."""
    return [
        (action.computation_type.value, action.stage_index, action.microbatch_index)
        for action in actions
        if action and action.microbatch_index is not None
    ]


def without_init(kind: type, **state: Any) -> Any:
    """A torch schedule with just what its table needs: no stages, no process group."""
    schedule = object.__new__(kind)
    vars(schedule).update(state)
    return schedule


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_gpipe(num_stages, num_microbatches):
    table = without_init(
        schedules.ScheduleGPipe, pp_group_size=num_stages, _num_stages=num_stages, _n_microbatches=num_microbatches
    )._get_pipeline_order()
    for rank, lane in enumerate(build_lanes("gpipe", num_stages, num_microbatches)):
        assert ours(lane) == theirs(table[rank])


@pytest.mark.parametrize(("num_stages", "num_microbatches"), LONG)
def test_1f1b(num_stages, num_microbatches):
    """Against the function below torch 2.13's `Schedule1F1B`, whose own table is off by one on the last rank."""
    for rank, lane in enumerate(build_lanes("1f1b", num_stages, num_microbatches)):
        num_warmup = min(num_stages - rank - 1, num_microbatches)
        counts = num_warmup, num_microbatches - num_warmup, num_warmup
        table = schedules._get_1f1b_rank_ops(1, num_stages, *counts, rank, *[lambda _, stage=rank: stage] * 2)
        assert ours(lane) == theirs(table)


SMALL = [(stages, microbatches, chunks) for stages, microbatches in [(1, 2), (2, 1), (2, 3), (2, 6)] for chunks in (2, 3)]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "chunks"), [*SMALL, *((4, microbatches, 2) for microbatches in (2, 4, 5, 8, 10, 12))]
)
def test_interleaved_1f1b(num_stages, num_microbatches, chunks):
    table = without_init(
        schedules.ScheduleInterleaved1F1B,
        pp_group_size=num_stages,
        n_local_stages=chunks,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // max(1, num_microbatches // num_stages),
    )
    for rank, lane in enumerate(build_lanes("interleaved-1f1b", num_stages, num_microbatches, chunks=chunks)):
        assert ours(lane) == theirs(table._calculate_single_rank_operations(rank))


@pytest.mark.parametrize(("num_stages", "chunks", "num_microbatches"), [(1, 2, 3), (2, 3, 4), (4, 2, 5)])
def test_breadth_first(num_stages, chunks, num_microbatches):
    """torch takes the microbatches of a range's backwards from the last to the first."""
    state = {"pp_group_size": num_stages, "_stages": [None] * chunks, "_n_microbatches": num_microbatches}
    table = without_init(schedules.ScheduleLoopedBFS, **state)
    for rank, lane in enumerate(build_lanes("breadth-first", num_stages, num_microbatches, chunks=chunks)):
        assert ours(lane) == [
            (kind[0], stage, microbatch if kind == "F" else num_microbatches - 1 - microbatch)
            for kind, stage, microbatch in theirs(table._calculate_single_rank_operations(rank))
        ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_zb_v(num_stages, num_microbatches):
    table = without_init(
        schedules.ScheduleZBVZeroBubble, pp_group_size=num_stages, num_stages=2 * num_stages, _n_microbatches=num_microbatches
    )
    for rank, lane in enumerate(build_lanes("zb-v", num_stages, num_microbatches, v_shaped=True)):
        assert ours(lane) == theirs(table._calculate_single_rank_operations(rank))


EXAMPLES = Path(__file__).parents[3] / "examples"


def textbook(num_stages: int, num_microbatches: int, stage: int) -> list[tuple[str, int]]:
    """The order that torch.distributed.pipelining gives: warm-up forwards, one of each in turn, the remaining backwards."""
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    order = [("F", microbatch) for microbatch in range(num_warmup)]
    for microbatch in range(num_microbatches - num_warmup):
        order += [("F", num_warmup + microbatch), ("B", microbatch)]
    return order + [("B", microbatch) for microbatch in range(num_microbatches - num_warmup, num_microbatches)]


FROZEN = {
    "encoder": {"frozen": ["vision"], "frozen_projectors": ["vision"]},
    "all but the projector": {"frozen": ["vision", "llm"]},
    "llm": {"frozen": ["llm"]},
    "encoder's body": {"frozen": ["vision"]},
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("builder", ["1f1b", "interleaved-1f1b", "dip"])
def test_what_is_frozen_does_not_change_the_order_of_a_lane(frozen, builder):
    """Stage s of S + P keeps its warm-up of S + P - s - 1 forwards and its turns, however short its backwards are."""
    groupings = {"vision": deal(12, 1), "llm": deal(12, 1)}
    case = build_case(build_graph("vision", **FROZEN[frozen]), {"vision": (1, 2, 1), "llm": (1, 4, 1)}, groupings)
    lanes = BUILDERS[builder](case).lanes
    for stage in range(2, 6) if builder == "dip" else range(6):
        found = [(action.kind.value, action.microbatch) for action in lanes[stage].actions if action.microbatch >= 0]
        has_backward = any(kind == "B" for kind, _ in found)
        assert found == [step for step in textbook(6, 12, stage) if has_backward or step[0] == "F"]


def test_a_frozen_model_of_published_stage_times_is_as_fast_as_without_a_weight_gradient_to_move():
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
def test_encoder_limits_follow_the_routes(vision, llm, limits):
    sizes = {"vision": (len(vision), 1, 1), "llm": (len(llm), 2, 1)}
    found = forward_limits(build_case(build_graph("vision"), sizes, {"vision": vision, "llm": llm}))
    assert [found["vision", replica, 0] for replica in range(len(vision))] == limits


def test_a_frozen_encoder_that_shares_a_lane_stays_two_microbatches_ahead():
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


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (3, 6), (4, 4), (4, 13)])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8), (2.0, 2.0, 1.0)])
def test_zb_h1_has_a_bubble_of_p_minus_1_forwards(num_stages, num_microbatches, seconds):
    """The formula (P - 1) (F + I - W); it holds where a weight gradient is not longer than an input gradient.

    No stage keeps more than the first one of 1F1B.
    """
    kinds = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
    schedule = BUILDERS["zb-h1"](one_unit(num_stages, num_microbatches))
    assert most_kept(schedule) == [min(num_stages, num_microbatches)] * num_stages
    taken = dict(zip(kinds, seconds, strict=True))
    times = execute_lanes(schedule, seconds=np.array([taken.get(each.kind, 0.0) for each in schedule.work.computed]))
    forward, gradient, weight = seconds
    bubble = (num_stages - 1) * (forward + gradient - weight)
    assert max(event.end_seconds for event in times.events) == pytest.approx(num_microbatches * sum(seconds) + bubble, abs=1e-9)


@pytest.mark.parametrize(("num_microbatches", "num_rounds", "kept"), [(8, 1, 8), (8, 2, 4), (8, 4, 2), (8, 8, 1), (7, 2, 4)])
def test_an_encoder_keeps_the_microbatches_of_one_round_of_dip(num_microbatches, num_rounds, kept):
    sizes = {"vision": (1, 1, 1), "llm": (1, 1, 1)}
    case = build_case(build_graph("vision"), sizes, {unit: deal(num_microbatches, 1) for unit in sizes}, colocated=True)
    assert most_kept(BUILDERS[f"dip:rounds={num_rounds}"](case)) == [kept + 1], "and the LLM one"


IN_TURN = {"vision": "0|1 (0-3,6-10|3-6)", "llm": "1|0 (0-2,4-6,8-10|2-4,6-8)"}
"""Three pieces of an encoder and five of the LLM, dealt to two lanes in turn: the LLM's lanes hold 3 and 2."""


def chain_order(case: StepShape, lane: int) -> list[tuple[str, int, int]]:
    """A lane's computations as (kind, position in the chain, microbatch)."""
    places = [(unit, stage) for unit in case.graph.unit_names for stage in range(case.plan.units[unit].num_virtual_stages)]
    return [
        (action.kind.value, places.index((action.unit, action.stage)), action.microbatch)
        for action in build_interleaved_1f1b(case).lanes[lane].actions
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    ]


@pytest.mark.parametrize("num_microbatches", [4, 6])
def test_a_chain_of_two_units_runs_as_one_unit_does(num_microbatches):
    samples = "|".join(map(str, range(num_microbatches)))
    chain = written_case(IN_TURN, dict.fromkeys(IN_TURN, samples)).shape
    alone = written_case({"llm": "0|1 (0-1,2-3,4-5,6-7|1-2,3-4,5-6,7-10)"}, {"llm": samples}).shape
    for lane in range(2):
        assert chain_order(chain, lane) == chain_order(alone, lane)


def test_one_unit_may_end_and_the_next_begin_in_one_chunk():
    shape = written_case({"vision": "0|1", "llm": "1|0 (0-3,6-10|3-6)"}, {"vision": "0|1", "llm": "0|1"}).shape
    chunks = (("vision", 0),), (("vision", 1), ("llm", 0)), (("llm", 1),), (("llm", 2),)
    assert chain_of_replica(shape, 0) == chunks
    second = [(kind, stage) for kind, stage, _ in chain_order(shape, 1)]
    assert second[:2] == [("F", 1), ("F", 2)] and second[-2:] == [("B", 2), ("B", 1)]


@pytest.mark.parametrize(
    ("plan", "vision", "is_chain"),
    [
        (IN_TURN, "0|1|2|3", True),
        ({"vision": "0|1", "llm": "2|3"}, "0|1|2|3", False),  # in one round
        (IN_TURN, "1|0|2|3", False),  # microbatches that do not go with the LLM's
    ],
)
def test_what_is_not_one_chain_is_not_taken_for_one(plan, vision, is_chain):
    shape = written_case(plan, {"vision": vision, "llm": "0|1|2|3"}).shape
    assert (chain_of_replica(shape, 0) is not None) == is_chain


def test_schedules_are_kept_as_far_as_their_slots_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [one_unit(2, count) for count in range(2, 6)]
    sizes = [2 * 2 * count + 2 for count in range(2, 6)]  # a forward and a backward each, and two reductions
    for most, num_kept in ((2 * (1 + max(sizes)), 2), (max(sizes), 1), (1 << 20, 3)):
        monkeypatch.setattr(building, "MOST_KEPT_SLOTS", most)
        cache = building.ScheduleCache(shapes[0].graph, shapes[0].plan, BUILDERS["1f1b"], capacity=3)
        found = [cache.find(shape) for shape in shapes]
        assert [len(each.draft.pieces) for each in found] == sizes
        kept = found[-num_kept:]
        assert all(cache.find(shape) is each for shape, each in zip(shapes[-num_kept:], kept, strict=True))
        assert cache.find(shapes[0]) is not found[0]
