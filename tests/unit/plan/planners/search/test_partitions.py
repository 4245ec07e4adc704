"""Partitions of microbatches over encoder pipelines: which are found, and when unequal ones are shorter."""

from dataclasses import replace

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.optimus import best_partition
from multimodal.plan.planners.plan_file import plan_lines
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.planners.search.filling_report import with_filling
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import other_partitions
from multimodal.values.plan import Plan
from multimodal.values.validate import read_plan, validate_plan
from tests.unit.plan.planners.planning_cases import LLM, TWO, VISION, request

PIPELINE = FixedSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1, virtual_stages=1)


def uneven_request() -> PlanningRequest:
    """Three transformer layers and a head on two stages: one of them has more to do; 24 microbatches that are alike."""
    graph = replace(TWO, units=(VISION, replace(LLM, transformer=replace(LLM.transformer, num_layers=3))))
    sizes = {"llm": PIPELINE, "vision": FixedSizes(1, 1)}
    return request(graph, fixed_sizes=sizes, lengths=request().lengths[:1], num_gpus=4, micro_batch_size=1)


def with_shares(run: PlannedRun, *shares: int) -> PlannedRun:
    return replace(run, plan=Plan({**run.plan.units, "vision": replace(run.plan.units["vision"], microbatch_shares=shares)}))


def test_an_unequal_partition_is_used_where_it_is_shorter(tmp_path):
    asked = uneven_request()
    run = PLANNERS["optimus"](asked)
    shares = run.plan.units["vision"].microbatch_shares
    assert len(shares) == 4 and sum(shares) == 24 and len(set(shares)) == 2
    prediction = predict_run(run, asked)
    assert prediction.iteration_seconds < 0.97 * predict_run(with_shares(run), asked).iteration_seconds
    found, report = with_filling(PredictedRun(run, prediction), asked)
    assert report is not None and report.partition == {"vision": shares}
    assert any(note.endswith(f"of the LLM's: vision {', '.join(map(str, shares))}") for note in found.run.notes)
    (tmp_path / "plan.yaml").write_text("\n".join(plan_lines(run.plan)))
    assert read_plan(tmp_path / "plan.yaml", graph=asked.graph, world_size=4) == run.plan


def test_no_partition_of_four_pipelines_is_much_shorter():
    """The best of all that give both pipelines of a stage equally many."""
    asked = uneven_request()
    run = PLANNERS["optimus"](asked)
    seconds = predict_run(run, asked).iteration_seconds
    every = (with_shares(run, count, count, 12 - count, 12 - count) for count in range(13))
    assert seconds <= 1.01 * min(predict_run(each, asked).iteration_seconds for each in every)


def test_moves_go_from_the_busiest_lanes_to_the_idlest():
    asked = uneven_request()
    run = with_shares(PLANNERS["optimus"](asked), 6, 6, 6, 6)
    first, *moves = [each.plan.units["vision"].microbatch_shares for each in other_partitions(run, asked)]
    assert sum(first) == 24 and first[0] < 6 < first[2], "the second stage has less to do"
    assert moves == [(5, 5, 7, 7), (7, 7, 5, 5)]
    for each in other_partitions(run, asked):
        validate_plan(each.plan, graph=asked.graph, world_size=4)


def test_shares_of_a_plan_count_as_turns():
    asked = uneven_request()
    run = with_shares(PLANNERS["optimus"](asked), 1, 1, 2, 2)
    assert (4 - 1, 4 - 1, 8 + 1, 8 + 1) in [each.plan.units["vision"].microbatch_shares for each in other_partitions(run, asked)]


@pytest.mark.parametrize("planner", ["megatron", "disttrain"])
def test_encoders_on_ranks_of_their_own_or_in_one_pipeline_have_nothing_to_move(planner):
    assert not list(other_partitions(PLANNERS[planner](request()), request()))


def test_the_search_ends_where_no_move_helps_and_tries_nothing_twice():
    asked, tried = uneven_request(), []
    even = PredictedRun(with_shares(PLANNERS["optimus"](asked)), predict_run(PLANNERS["optimus"](asked), asked))

    def predict(run: PlannedRun) -> PredictedRun | None:
        tried.append(run.key)
        return None

    assert best_partition(even, asked, predict=predict) == even
    assert len(tried) == len(set(tried)) > 0
