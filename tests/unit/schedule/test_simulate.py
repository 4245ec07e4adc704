"""The rules of the event kernel, in examples; its Python reference gives the same of any schedule (`test_every_schedule.py`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings

from multimodal.cost.step_costs import ComputeCost
from multimodal.schedule import simulate_events as events_module
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timelines
from multimodal.schedule.execute_lanes import Execution, execute_lanes
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule, timeline_of_unit_costs
from multimodal.schedule.simulate_events import EventArrays, NodeKind, simulate_events
from multimodal.values.action import Action, Place, action_to_text
from multimodal.values.errors import ConfigError, ScheduleError
from multimodal.values.schedule import Lane, Schedule
from multimodal.values.shape import StepShape
from multimodal.values.timeline import Timeline
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.schedule.built_schedules import GivenCosts, UniformCosts, broken_schedules
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.schedule_text import schedule_from_text
from tests.unit.schedule.test_golden_schedules import NOTHING, schedule_of


def lower(case: StepShape, builder: str = "1f1b", *passes: str) -> Schedule:
    schedule = BUILDERS[builder](case)
    for name in passes:
        schedule = PASSES[name](schedule)
    return insert_communication(schedule)


def pipeline(*, pp: int, num_microbatches: int, dp: int = 1) -> StepShape:
    return build_case(build_graph(), {"llm": (dp, pp, 1)}, {"llm": deal(num_microbatches * dp, dp)})


def one_sample(*, frozen: Sequence[str] = ()) -> StepShape:
    sizes = {"vision": (1, 1, 1), "llm": (1, 1, 1)}
    return build_case(build_graph("vision", frozen=frozen), sizes, {unit: deal(1, 1) for unit in sizes})


@pytest.mark.parametrize("builder", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9)])
def test_uniform_pipelines_match_their_closed_form(builder: str, pp: int, num_microbatches: int) -> None:
    case = pipeline(pp=pp, num_microbatches=num_microbatches)
    costs = UniformCosts(forward=1.25, backward=2.5, model_flops=30.0, peak_flops_per_second=4.0)
    found = simulate_schedule(lower(case, builder), costs)
    assert found.iteration_seconds == pytest.approx((num_microbatches + pp - 1) * 3.75, rel=1e-12)
    assert found.ideal_seconds == pytest.approx(num_microbatches * 3.75, rel=1e-12)
    assert found.mfu == pytest.approx(7.5 / found.iteration_seconds)
    assert found.bubble["pp_warmup"] == pytest.approx((pp - 1) / 2 * 1.25 / found.iteration_seconds)
    assert found.bubble["pp_cooldown"] == pytest.approx((pp - 1) / 2 * 2.5 / found.iteration_seconds)
    assert found.bubble["pp_other"] == pytest.approx((pp - 1) / 2 * 3.75 / found.iteration_seconds)
    assert (found.num_lanes, found.num_microbatches) == (pp, num_microbatches)


def test_each_rank_counts_alike_however_many_a_lane_has() -> None:
    sizes = {"vision": (1, 1, 1), "llm": (1, 1, 3)}
    case = build_case(build_graph("vision"), sizes, {unit: deal(1, 1) for unit in sizes})
    found = simulate_schedule(lower(case), UniformCosts(forward=1.25, backward=2.5))
    assert found.iteration_seconds == pytest.approx(7.5)
    waits = {"pp_warmup": 1.25 * 3, "pp_other": 3.75, "pp_cooldown": 2.5 * 3}  # of three LLM ranks, and the encoder's one
    assert found.bubble == pytest.approx(dict.fromkeys(found.bubble, 0.0) | {kind: each / 30 for kind, each in waits.items()})


def simulated(document: dict[str, Any]) -> str:
    """Say how long a step takes, which lanes idle why, what they keep at most and, where asked for, what happens when."""
    schedule = schedule_of({**document, "lowered": True})
    found = simulate_schedule(schedule, UniformCosts(**document["costs"]))
    idle = {kind: float(f"{share:.6g}") for kind, share in found.bubble.items() if share}
    told = [
        f"{found.iteration_seconds:g} s",
        f"idle {idle}",
        f"keeps {[*found.peak_activation_bytes]} of {[*found.peak_total_bytes]}",
    ]
    return "; ".join([*told, *(told_events(found.timeline) if document["events"] else ())])


def told_events(timeline: Timeline) -> list[str]:
    return [f"{action_to_text(each.action)} {each.start_seconds:g}-{each.end_seconds:g}" for each in timeline.events]


def run_with_unit_costs(document: dict[str, Any]) -> str:
    return "; ".join(told_events(timeline_of_unit_costs(schedule_of({**document, "lowered": True}))))


ONE = {"plan": {"llm": "0"}, "samples": {"llm": "0"}, **NOTHING, "costs": {}, "events": False}
NODES = {"lanes": [[0]], "seconds": [1], "kinds": {}, "needs": {}, "fillers": []}
PAIR = {"plan": {"vision": "0", "llm": "1"}, "samples": {"vision": "0", "llm": "0"}, **NOTHING}
SIMULATIONS: Kinds = {
    "simulation": (ONE, simulated),
    "unit costs": (PAIR, run_with_unit_costs),
    "starts of nodes": (NODES, lambda document: starts_of_nodes(**document)),
}
test_every_simulation_is_as_written = golden_test("simulations.txt", SIMULATIONS)


def test_a_replica_that_is_done_early_waits_for_the_reduction() -> None:
    case = pipeline(pp=1, num_microbatches=1, dp=2)
    costs = GivenCosts(collective=1.0, seconds=lambda action: 1.0 + action.replica)
    found = simulate_schedule(lower(case), costs)
    assert found.iteration_seconds == 5
    assert found.bubble["dp_reduce_scatter"] == pytest.approx((3 + 1) / 10)


def test_stage_seconds_add_up_all_computations_of_a_microbatch() -> None:
    case = pipeline(pp=2, num_microbatches=2)
    found = simulate_schedule(lower(case, "1f1b", "split-backward"), UniformCosts(forward=1.0, backward=3.0))
    assert found.stage_seconds == {Place("llm", 0, stage, microbatch): 4.0 for stage in (0, 1) for microbatch in (0, 1)}


def test_a_schedule_that_cannot_finish_is_refused_with_its_place() -> None:
    text = "F llm/0/0/0; B llm/0/0/0; F llm/0/0/1; B llm/0/0/1; RG llm/0/0"
    case = pipeline(pp=1, num_microbatches=2)
    with pytest.raises(ScheduleError, match=r"(?s)cannot finish.*> B llm/0/0/1 <"):
        simulate_schedule(
            schedule_from_text("lane 0: " + text.replace("F llm/0/0/1; B llm/0/0/1", "B llm/0/0/1; F llm/0/0/1"), case),
            UniformCosts(),
        )
    with pytest.raises(ScheduleError, match="B llm/0/0/1 needs F llm/0/0/1, which the schedule lacks"):
        simulate_schedule(schedule_from_text("lane 0: " + text.replace("F llm/0/0/1; ", ""), case), UniformCosts())


def test_wrong_costs_are_named() -> None:
    case = pipeline(pp=1, num_microbatches=1)
    with pytest.raises(ConfigError, match="costs of F llm/0/0/0: found nan seconds"):
        simulate_schedule(lower(case), GivenCosts(seconds=lambda action: float("nan")))

    class Greedy(UniformCosts):
        def compute(self, action: Action) -> ComputeCost:
            return ComputeCost(1.0, 2.0)

    with pytest.raises(ConfigError, match="the tensor parallel share no longer than the computation"):
        simulate_schedule(lower(case), Greedy())


def test_a_timeline_is_drawn_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, timeline in {"full": timeline_of_unit_costs(lower(one_sample())), "empty": Timeline(((0,),), ())}.items():
        draw_timelines({name: timeline}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def assert_alike(schedule: Schedule, seconds: np.ndarray | None = None) -> None:
    fast = execute_lanes(schedule, seconds=seconds)
    schedule.made.clear()
    with mock.patch.object(events_module, "kernels", None):
        slow = execute_lanes(schedule, seconds=seconds)
    assert (fast.events, fast.positions.tolist(), done(fast)) == (slow.events, slow.positions.tolist(), done(slow))


def done(execution: Execution) -> set[Action]:
    return {execution.schedule.work.actions[piece] for piece in np.flatnonzero(execution.is_done).tolist()}


@settings(max_examples=100)
@given(broken=broken_schedules())
def test_broken_schedules_stop_where_they_stop_in_the_reference(broken: tuple[StepShape, tuple[Lane, ...], bool]) -> None:
    case, lanes, lowered = broken
    try:
        schedule = Schedule.of_lanes(case, lanes, lowered=lowered)
    except ScheduleError:
        assume(False)
    assert_alike(schedule)


def starts(rows):
    return np.cumsum([0, *map(len, rows)])


def flat(rows, dtype=np.int64):
    return np.array([value for row in rows for value in row], dtype)


def build_arrays(lanes, *, seconds, needs=None, fillers=(), kinds=None, latency=None, receivers=None, links=None):
    """Nodes 0, 1, ... are computations without needs unless told otherwise."""
    nodes = range(len(seconds))
    needs = [(needs or {}).get(node, ()) for node in nodes]
    receivers = [(receivers or {}).get(node, ()) for node in nodes]
    links = [(links or {}).get(node, -1) for node in nodes]
    is_filler = flat([[node in fillers for node in lane] for lane in lanes], np.uint8)
    kinds = np.array([(kinds or {}).get(node, NodeKind.COMPUTE) for node in nodes], np.uint8)
    rows = (each for lists in (needs, receivers) for each in (starts(lists), flat(lists)))
    latencies = np.array([(latency or {}).get(node, 0.0) for node in nodes])
    times = (np.array(seconds, np.float64), latencies, np.array(links), max(links) + 1)
    return EventArrays(starts(lanes), flat(lanes), is_filler, kinds, *rows, *times)


def starts_of_nodes(lanes, seconds, *, kinds, **given):
    arrays = build_arrays(lanes, seconds=seconds, kinds={int(node): NodeKind[kind] for node, kind in kinds.items()}, **given)
    times = simulate_events(arrays)
    stops = f", lanes stop at {times.positions.tolist()}" if np.isnan(times.start_seconds).any() else ""
    return " ".join(f"{start:g}" for start in times.start_seconds) + stops
