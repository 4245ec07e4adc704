"""Encoders and generators in bubbles or pauses of the LLM's pipeline: what a step takes, and how many microbatches are alive."""

import math
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.filling_report import measure_filling
from multimodal.cost.layers.registry import count_segments
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import ComputeCost
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, SegmentRange
from multimodal.values.schedule import SlotMode
from tests.unit.schedule.built_schedules import GivenCosts, UniformCosts, built, costs_of, most_kept, seconds_of
from tests.unit.schedule.schedule_cases import build_case, build_graph, copies, deal, with_generator


@pytest.mark.parametrize(
    ("num_microbatches", "encoder_seconds", "idle_seconds"), [(4, 1.0, 1.0), (8, 1.0, 1.0), (8, 0.5, 1.0), (8, 2.0, 0.0)]
)
def test_encoders_leave_next_to_nothing_of_the_bubbles(
    num_microbatches: int, encoder_seconds: float, idle_seconds: float
) -> None:
    step, costs = copies(2, num_microbatches), costs_of(llm=1.0, vision=encoder_seconds)
    busy_seconds = 3 * num_microbatches + 3 * encoder_seconds * num_microbatches / 2
    assert seconds_of("optimus", step, costs) == busy_seconds + idle_seconds
    for other in ("1f1b", "eager-1f1b", "dip"):
        assert seconds_of(other, step, costs) > busy_seconds + idle_seconds


def test_a_lean_schedule_keeps_at_most_twice_what_1f1b_keeps() -> None:
    """The LLM has two microbatches in flight, one on each encoder's replica, which holds one more of its own."""
    step, costs = copies(2, 32), costs_of(llm=1.0, vision=0.25)
    plain, lean, most = (most_kept(built(name, step, costs), "vision") for name in ("1f1b", "optimus-lean", "optimus"))
    assert max(plain) <= 2 and max(lean) <= 4 < min(most)
    vision, llm = step.graph.units
    frozen = replace(step, graph=replace(step.graph, units=(replace(vision, freeze_module=True, freeze_projector=True), llm)))
    assert built("optimus-lean", frozen, costs) == built("optimus", frozen, costs), "it keeps nothing"


@pytest.mark.parametrize(("schedule", "limit"), [("optimus", 16), ("optimus-zb", 16), ("optimus-lean", 6)])
def test_an_encoder_on_its_own_rank_keeps_what_fits_into_its_memory(schedule: str, limit: int) -> None:
    """1F1B keeps one microbatch of its own and the two of the LLM, which is so slow that the encoder could encode all ahead."""
    sizes = {"vision": (1, 1, 1), "llm": (1, 2, 1)}
    step = build_case(build_graph("vision"), sizes, {unit: deal(16, 1) for unit in sizes})
    (lane,) = step.lanes_of("vision", 0, 0)
    assert most_kept(built("1f1b", step, UniformCosts()), "vision")[lane] == 3
    for room, expected in ((math.inf, limit), (59, 5), (0, 3)):
        costs = replace(costs_of(llm=1.0, vision=0.1), static=1000, memory_bytes=(1000 + room) / 0.9)
        assert most_kept(built(schedule, step, costs), "vision")[lane] == expected


def test_the_share_of_encoder_work_in_bubbles() -> None:
    """Alone, the LLM takes 27 s; each lane encodes for 6 s, which lengthen the step by 4 s, or by all 6 around the LLM's work."""
    step, costs = copies(2, 8), costs_of(llm=1.0, vision=0.5)
    found = measure_filling(BUILDERS["optimus"].with_costs(costs), step, costs)
    assert found is not None
    assert (found.alone.iteration_seconds, found.filled.iteration_seconds) == (27.0, 31.0)
    assert found.eff_fine == pytest.approx(1 - 4 / 6)
    assert found.eff_coarse < found.eff_fine
    idle = GivenCosts(seconds=lambda action: 0.0 if action.unit == "vision" else 1.0)
    assert measure_filling(BUILDERS["optimus"].with_costs(idle), step, idle) is None


@dataclass(frozen=True)
class SegmentCosts(UniformCosts):
    """An encoder's forward takes one second, its segments alike, the LLM's four, half of it waits; backwards twice as long."""

    num_segments: int = 1

    def compute(self, action: Action) -> ComputeCost:
        seconds = 1.0 if action.kind is ActionKind.FORWARD else 2.0
        if action.unit == "llm":
            return ComputeCost(4 * seconds, 2 * seconds, (seconds / 2,) * 4)
        covers = action.covers
        share = (covers.end - covers.first) / self.num_segments if isinstance(covers, SegmentRange) else 1.0
        return ComputeCost(share * seconds)


def test_segments_of_encoders_run_inside_the_waits_of_the_llm() -> None:
    """Two ranks share the LLM's only stage; each has an encoder. Only the first forwards and the last backwards are alone."""
    sizes = {"vision": (2, 1, 1), "llm": (1, 1, 2)}
    step = build_case(build_graph("vision"), sizes, {"vision": deal(8, 2), "llm": deal(8, 1)}, colocated=True)
    num_segments = count_segments(step.graph.unit("vision"), step.plan.virtual_stage("vision", 0, 0).layers)
    costs = SegmentCosts(num_segments=num_segments)
    schedule = built("optimus", step, costs)
    inside = [slot for lane in schedule.lanes for slot in lane.slots if slot.mode is SlotMode.INSIDE]
    assert len(inside) > 8 and all(slot.action.unit == "vision" for slot in inside)
    found = measure_filling(BUILDERS["optimus"].with_costs(costs), step, costs)
    assert found is not None and found.alone.iteration_seconds == 8 * 12
    assert found.filled.iteration_seconds <= 8 * 12 + 1 + 2 + 1e-6
    assert found.eff_fine > 0.7 and found.eff_coarse == pytest.approx(0.0, abs=1e-9)
    with patch.object(SegmentCosts, "waits", lambda self, work, pieces: (np.zeros(len(pieces) + 1, np.int64), np.zeros(0))):
        assert not built("optimus", step, costs).has_inside


class SharedSegmentCosts(SegmentCosts):
    """A segment of an encoder over two ranks has a collective behind it, of a tenth of its time."""

    def compute(self, action: Action) -> ComputeCost:
        found = super().compute(action)
        return found if action.unit == "llm" else found._replace(tensor_parallel_seconds=found.seconds / 10)


def test_encoders_over_several_ranks_run_inside_too_between_their_collectives() -> None:
    """Vision over both of the LLM's ranks, audio on each: vision stands in the same waits of both lanes."""
    sizes = {"vision": (1, 1, 2), "audio": (2, 1, 1), "llm": (1, 1, 2)}
    groupings = {"vision": deal(6, 1), "audio": deal(6, 2), "llm": deal(6, 1)}
    step = build_case(build_graph("vision", "audio"), sizes, groupings, colocated=True)
    num_segments = count_segments(step.graph.unit("vision"), step.plan.virtual_stage("vision", 0, 0).layers)
    costs = SharedSegmentCosts(num_segments=num_segments)
    schedule = built(
        "optimus", step, costs
    )  # validates with the most collectives that layers can have, as `costs` knows no options
    inside = [[slot for slot in lane.slots if slot.mode is SlotMode.INSIDE] for lane in schedule.lanes]
    shared = [[slot for slot in lane if slot.action.unit == "vision"] for lane in inside]
    assert len(shared[0]) > 8 and set(shared[0]) == set(shared[1])
    assert all({"audio", "vision"} == {slot.action.unit for slot in lane} for lane in inside)
    validate_schedule(schedule, options=RunOptions(transformer_impl="local", sequence_parallel=True, recompute="full"))
    with patch.object(SharedSegmentCosts, "waits", lambda self, work, pieces: (np.zeros(len(pieces) + 1, np.int64), np.zeros(0))):
        unfilled = seconds_of("optimus", step, costs)
    assert simulate_schedule(schedule, costs).iteration_seconds < 0.99 * unfilled


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [3, 9])
@pytest.mark.parametrize("encoder_seconds", [0.25, 1.0, 3.0])
def test_a_step_takes_the_llms_time_and_the_encoders_and_keeps_two_of_their_microbatches(
    num_stages: int, rounds: int, encoder_seconds: float
) -> None:
    step, costs = copies(num_stages, rounds * num_stages), costs_of(backward=2.5, llm=1.0, vision=encoder_seconds)
    schedule = built("nested", step, costs)
    pipeline = 3.5 * (rounds * num_stages + num_stages - 1)
    found = simulate_schedule(schedule, costs).iteration_seconds
    assert found == pytest.approx(pipeline + 3.5 * encoder_seconds * rounds, abs=1e-6)
    assert max(most_kept(schedule, "vision")) == 2
    dip = built("dip", step, costs)
    assert found == pytest.approx(simulate_schedule(dip, costs).iteration_seconds, abs=1e-6)
    assert max(most_kept(dip, "vision")) == rounds
    assert max(most_kept(schedule, "llm")) == num_stages


@pytest.mark.parametrize("rounds", [3, 9])
def test_an_interleaved_llm_keeps_its_order(rounds: int) -> None:
    step, costs = copies(2, 2 * rounds, chunks=2), costs_of(backward=2.5, llm=0.5, vision=1.0)
    alone = build_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(2 * rounds, 1)}, layouts={"llm": {"chunks": 2}})
    pipeline = seconds_of("interleaved-1f1b", alone, costs)
    schedule = built("nested", step, costs)
    assert simulate_schedule(schedule, costs).iteration_seconds == pytest.approx(pipeline + 3.5 * rounds, abs=1e-6)
    assert max(most_kept(schedule, "vision")) <= 3


@pytest.mark.parametrize("rounds", [3, 9])
def test_stages_of_an_encoder_have_a_pause_between_them(rounds: int) -> None:
    """An encoder over both lanes: the last stage keeps as many as the LLM has in flight, and one; the first, two more."""
    sizes = {"vision": (1, 2, 1), "llm": (1, 2, 1)}
    groupings = {unit: deal(2 * rounds, 1) for unit in sizes}
    step, costs = build_case(build_graph("vision"), sizes, groupings, colocated=True), costs_of(backward=2.5, llm=1.0, vision=0.5)
    schedule = built("nested", step, costs)
    assert max(most_kept(schedule, "vision")) == 5
    work = 3.5 * (2 * rounds + 1) + 3.5 * 0.5 * 2 * rounds
    found = simulate_schedule(schedule, costs).iteration_seconds
    assert found == pytest.approx(work, abs=1e-6)


@pytest.mark.parametrize("num_microbatches", [6, 18])
def test_a_generator_makes_and_forgets_in_one_pause(num_microbatches: int) -> None:
    step, costs = with_generator(num_microbatches), costs_of(backward=2.5, llm=1.0, vision=0.5, image=0.75)
    schedule = built("nested", step, costs)
    assert max(most_kept(schedule, "image")) == 1 and max(most_kept(schedule, "vision")) <= 3
    busy = 3.5 * (num_microbatches + 1.25 * num_microbatches / 2)
    assert simulate_schedule(schedule, costs).iteration_seconds == pytest.approx(busy + 3.5, abs=1e-6)
