"""Encoders and generators in bubbles or pauses of the LLM's pipeline: what a step takes, and how many microbatches are alive."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from multimodal.cost.layers.registry import count_segments
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import ComputeCost
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import MEMORY_SHARE
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, SegmentRange
from multimodal.values.schedule import SlotMode
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.schedule.built_schedules import GivenCosts, UniformCosts, built, costs_of, most_kept, seconds_of
from tests.unit.schedule.schedule_cases import build_case, build_graph, copies, deal, written_case
from tools.filling_report import measure_filling


def filled(document: dict[str, Any]) -> str:
    """Say of builders how long a step takes, how many microbatches of a unit a lane keeps at most, and which backwards are cut.

    costs: of `costs_of`; memory: bytes of a rank beside its weights and a tenth that nothing may take; a microbatch keeps 10.
    """
    shape = written_case(
        document["plan"], document["samples"], **dict.fromkeys(("frozen", "frozen_projectors"), document["frozen"])
    ).shape
    costs = costs_of(**document["costs"])
    if document["memory"] is not None:
        costs = replace(costs, static=1000, memory_bytes=(1000 + document["memory"]) / MEMORY_SHARE)
    told = []
    for name in document["builders"]:
        schedule = built(name, shape, costs)
        actions = [action for lane in schedule.lanes for action in lane.actions]
        kept = {unit: max(most_kept(schedule, unit)) for unit in document["plan"]}
        halves = sorted({action.unit for action in actions if action.kind is ActionKind.WEIGHT_GRADIENT})
        seconds = simulate_schedule(schedule, costs).iteration_seconds
        told.append(f"{name} {seconds:g} s, keeps {kept}" + (f", cuts {halves}" if halves else ""))
    return "; ".join(told)


STEP = {"plan": {"llm": "0"}, "samples": {"llm": "0"}, "costs": {"llm": 1.0}, "memory": None, "frozen": [], "builders": ["1f1b"]}
FILLED: Kinds = {"filled": (STEP, filled)}
test_encoders_and_weight_gradients_fill_bubbles_as_written = golden_test("fillings.txt", FILLED)


def test_the_share_of_encoder_work_in_bubbles():
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


def test_segments_of_encoders_run_inside_the_waits_of_the_llm():
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


def test_encoders_over_several_ranks_run_inside_too_between_their_collectives():
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
def test_a_step_takes_the_llms_time_and_the_encoders_and_keeps_two_of_their_microbatches(num_stages, rounds, encoder_seconds):
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
