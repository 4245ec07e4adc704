from dataclasses import replace

import pytest

from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import build_unit, even_layout
from multimodal.plan.planners.idle_units import place_idle_units, without_idle_units
from multimodal.plan.planners.search.prediction import keep_replicas, kept_plan, predict_run
from multimodal.values.plan import Plan
from tests.unit.plan.planners.planning_cases import LLM, TWO, VISION, request
from tests.unit.plan.planners.test_idle_units import without_items


def colocated(*, encoder_tensor: int, encoder_data: int, tensor: int, data: int, pipeline: int) -> Candidate:
    layouts = {
        "vision": even_layout(VISION, encoder_tensor, encoder_data, 1),
        "llm": even_layout(LLM, tensor, data, pipeline),
    }
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
    whole, share = (predict_run(run, asked, max_actions=most, kept_replicas=1) for most in (None, 16))
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


def test_a_share_of_a_colocated_plan_predicts_the_whole():
    asked = request(TWO, num_gpus=16, global_batch_size=64, lengths=request(TWO).lengths[:1])
    candidate = colocated(encoder_tensor=1, encoder_data=16, tensor=2, data=4, pipeline=2)
    run = candidate.to_run(asked, seconds=0.0)
    whole, share = predict_run(run, asked), predict_run(run, asked, max_actions=100)
    assert share.replica_share == 4
    assert share.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.06)
    assert share.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.01)


def test_predictions_average_consecutive_batches():
    asked = request(TWO, global_batch_size=16)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=1, data=4, pipeline=2).to_run(asked, seconds=0.0)
    one, three = (predict_run(run, asked, num_batches=count).iteration_seconds for count in (1, 3))
    assert one != three and 0.5 < one / three < 2


@pytest.mark.parametrize("max_actions", [None, 4])
def test_what_is_above_the_floor_adds_up_by_kind(max_actions):
    asked = request(TWO, global_batch_size=48)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    for each in (run, replace(run, recompute="full")):
        found = predict_run(each, asked, max_actions=max_actions)
        assert 0 < found.floor_seconds < found.ideal_seconds <= found.busiest_seconds <= found.iteration_seconds
        shares = sum(found.above_floor.values())
        assert shares == pytest.approx(1 - found.floor_seconds / found.iteration_seconds, abs=1e-9)
        assert found.above_floor["tp"] > 0


def test_the_floor_holds_no_recomputation():
    asked = request(TWO)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    plain, again = predict_run(run, asked), predict_run(replace(run, recompute="full"), asked)
    assert again.floor_seconds == pytest.approx(plain.floor_seconds)
    assert again.ideal_seconds > 1.1 * plain.ideal_seconds
    assert again.above_floor["recomputation"] > 0.1 > 1e-9 > plain.above_floor["recomputation"]
