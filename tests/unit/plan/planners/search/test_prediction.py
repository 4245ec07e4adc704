from dataclasses import replace

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.prediction import judge_run, predict_run
from multimodal.plan.planners.search.simulated_part import WHOLE, Fidelity
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, THREE, TWO, request
from tests.unit.plan.planners.search.test_simulated_part import colocated

PART = Fidelity("part", 1.0)


@pytest.mark.parametrize(
    ("graph", "plan", "max_actions", "num_shares", "tolerance"),
    [
        (TWO, colocated(encoder_tensor=1, encoder_data=16, tensor=2, data=4, pipeline=2), 100, 4, 0.06),
        (THREE, "megatron", 40, 4, 0.02),
        (TEXT_ONLY, Candidate({"llm": even_layout(LLM, 1, 8, 2, context=2)}), 20, 8, 0.02),
    ],
    ids=["colocated", "one grid", "context parallel"],
)
def test_a_share_of_the_replicas_predicts_the_whole(graph, plan, max_actions, num_shares, tolerance):
    lengths = (SampleLengths(0, (), 8192, 1000),) if graph is TEXT_ONLY else request(graph).lengths[:1]
    asked = request(graph, num_gpus=16, global_batch_size=64, lengths=lengths)
    fixed = {"llm": FixedSizes(data_parallel_size=4)}
    run = PLANNERS[plan](replace(asked, fixed_sizes=fixed)) if isinstance(plan, str) else plan.to_run(asked, seconds=0.0)
    whole, share = predict_run(run, asked), predict_run(run, asked.changed(max_actions=max_actions), fidelity=PART)
    assert (whole.replica_share, share.replica_share) == (1, num_shares)
    assert share.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=tolerance)
    assert share.mfu == pytest.approx(whole.mfu, rel=tolerance)
    assert share.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=0.01 if graph is TWO else 1e-9)


def test_a_long_step_is_continued_from_a_shorter_one():
    asked = request(TWO, global_batch_size=256, lengths=request(TWO).lengths[:1])
    run = PLANNERS["disttrain"](replace(asked, fixed_sizes={"llm": FixedSizes(data_parallel_size=1)}))
    whole, part = predict_run(run, asked), predict_run(run, asked.changed(max_actions=200), fidelity=PART)
    assert part.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=0.01)
    assert sum(part.bubble.values()) == pytest.approx(sum(whole.bubble.values()), abs=0.02)


def test_predictions_average_consecutive_batches():
    asked = request(TWO, global_batch_size=16)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=1, data=4, pipeline=2).to_run(asked, seconds=0.0)
    one, three = (judge_run(run, asked.changed(num_batches=count)).iteration_seconds for count in (1, 3))
    assert one != three and 0.5 < one / three < 2


@pytest.mark.parametrize("fidelity", [WHOLE, PART])
def test_what_is_above_the_floor_adds_up_by_kind(fidelity):
    asked = request(TWO, global_batch_size=48, max_actions=4)
    run = colocated(encoder_tensor=1, encoder_data=8, tensor=2, data=2, pipeline=2).to_run(asked, seconds=0.0)
    for each in (run, replace(run, recompute="full")):
        found = predict_run(each, asked, fidelity=fidelity)
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
