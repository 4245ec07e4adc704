from dataclasses import replace

import pytest

from multimodal.plan.planners.search.prediction import predict_run
from tests.unit.plan.planners.planning_cases import TWO, request
from tests.unit.plan.planners.search.test_simulated_part import colocated


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
