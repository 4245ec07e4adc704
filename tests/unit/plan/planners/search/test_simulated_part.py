"""Which replicas stand for all of them in a simulation."""

from dataclasses import replace

import pytest

from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import build_unit, even_layout
from multimodal.plan.planners.idle_units import place_idle_units, without_idle_units
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.simulated_part import WHOLE, Fidelity, keep_replicas, kept_plan
from multimodal.values.plan import Plan
from tests.unit.plan.planners.planning_cases import LLM, TWO, VISION
from tests.unit.plan.planners.test_idle_units import without_items


def colocated(*, encoder_tensor: int, encoder_data: int, tensor: int, data: int, pipeline: int) -> Candidate:
    layouts = {"vision": even_layout(VISION, encoder_tensor, encoder_data, 1), "llm": even_layout(LLM, tensor, data, pipeline)}
    return Candidate(layouts, groups=(("vision", "llm"),))


def ranks(plan: Plan, unit: str) -> set[int]:
    return set(plan.units[unit].ranks)


def test_units_that_share_ranks_keep_the_same_ones():
    plan = colocated(encoder_tensor=1, encoder_data=16, tensor=2, data=4, pipeline=2).build_plan(TWO)
    share = keep_replicas(plan, 2)
    assert share is not None
    assert ranks(share, "vision") == ranks(share, "llm") == {0, 1, 2, 3, 8, 9, 10, 11}
    assert [share.units[unit].data_parallel_size for unit in ("vision", "llm")] == [8, 2]


def test_replicas_that_overlap_in_part_have_no_share():
    plan = colocated(encoder_tensor=4, encoder_data=4, tensor=1, data=8, pipeline=2).build_plan(TWO)
    assert keep_replicas(plan, 4) is None
    assert keep_replicas(plan, 2) is not None


def test_units_without_work_keep_no_replica_from_being_left_out():
    asked = without_items(TWO, "vision", num_gpus=8, global_batch_size=64, micro_batch_size=1)
    asked = replace(asked, lengths=asked.lengths[:1])
    candidate = Candidate({"llm": even_layout(LLM, 1, 4, 2)})
    run = place_idle_units(candidate.to_run(without_idle_units(asked), seconds=0.0), asked)
    assert run.plan.units["vision"].data_parallel_size == 1
    kept = kept_plan(run.plan, asked, 4)
    assert kept is not None and [kept.units[unit].data_parallel_size for unit in ("vision", "llm")] == [1, 1]
    assert ranks(kept, "vision") <= ranks(kept, "llm")
    whole, share = (
        predict_run(run, asked.changed(max_actions=16), fidelity=each) for each in (WHOLE, Fidelity("part", 1.0, kept_replicas=1))
    )
    assert (whole.replica_share, share.replica_share) == (1, 4)
    assert share.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.06)


def test_a_unit_without_work_that_finds_no_room_keeps_all_replicas():
    asked = without_items(TWO, "vision")
    units = {
        "vision": build_unit(even_layout(VISION, 1, 1, 6), first_rank=0),
        "llm": build_unit(even_layout(LLM, 1, 4, 2), first_rank=0),
    }
    assert kept_plan(Plan(units), asked, 4) is None
    assert kept_plan(Plan(units), asked, 1) == Plan(units)
