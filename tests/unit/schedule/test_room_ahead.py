"""Schedules whose forwards run ahead as far as memory allows: how far, and that what is kept fits."""

from dataclasses import dataclass

import pytest

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import forward_limits
from multimodal.schedule.builders.room_ahead import FACTORS, MEMORY_SHARE, factors_within_memory
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Place
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal
from tests.unit.schedule.uniform_costs import UniformCosts


@dataclass(frozen=True)
class MemoryCosts(UniformCosts):
    """Microbatch k keeps k + 1 bytes in every stage, or the same of all; weights take 100."""

    room: float = 0.0
    grows: bool = True

    @property
    def memory_bytes(self) -> float:
        return (100 + self.room + 1e-6) / MEMORY_SHARE

    def activation_bytes(self, place: Place) -> int:
        return place.microbatch + 1 if self.grows else 1

    def static_bytes(self, lane: int) -> int:
        return 100


def llm_step(num_microbatches: int = 8) -> StepShape:
    return build_case(build_graph(), {"llm": (1, 4, 1)}, {"llm": deal(num_microbatches, 1)})


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
    found = factors_within_memory(step, forward_limits(step), costs=MemoryCosts(room=room))
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
    found = factors_within_memory(case, dict.fromkeys(case.stages, 1), costs=MemoryCosts(room=3, grows=False))
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
    costs = MemoryCosts(room=room, grows=False)
    schedule = build_schedule(BUILDERS[builder].with_costs(costs), step, passes=passes, costs=costs)
    kept = simulate_schedule(schedule, costs).peak_memory_bytes - 100
    assert kept <= max(room, max(forward_limits(step).values()))


@pytest.mark.parametrize(("builder", "plain"), [("eager-1f1b-memory", "1f1b"), ("zb-memory", "zb-h1")])
def test_without_room_it_stores_no_more_and_with_room_it_is_no_slower(builder: str, plain: str) -> None:
    step = deferring_step(16)
    seconds = {}
    for name, row, room in (("plain", plain, 0), ("full", builder, 0), ("roomy", builder, 100)):
        costs = MemoryCosts(room=room, grows=False)
        schedule = build_schedule(BUILDERS[row].with_costs(costs), step, costs=costs)
        seconds[name] = simulate_schedule(schedule, costs).iteration_seconds
    assert seconds["full"] == seconds["plain"]
    assert seconds["roomy"] <= seconds["plain"]
    assert seconds["roomy"] < seconds["plain"] or builder != "zb-memory"
