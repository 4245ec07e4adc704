"""Simulations that are counted and remembered, and what is known of a run without one."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.baselines import COMPARED
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import estimate_seconds, exposed_reduction_seconds, reduction_seconds
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.plan_file import plan_lines
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.plan.planners.search import trials
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import climb, other_cuts, other_partitions, other_passes, other_sizes
from multimodal.plan.planners.search.simulated_part import FINAL, QUICK, RANKING
from multimodal.plan.planners.search.trials import MISFIT, Trials
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.validate import read_plan, validate_plan
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, TWO, VISION, request, with_memory
from tools.filling_report import with_filling


@pytest.fixture
def calls(monkeypatch):
    """The sizes of all simulations: most actions, and number of batches."""
    found = []

    def recorded(run, asked, *, fidelity):
        found.append((fidelity.max_actions(asked), fidelity.num_batches(asked)))
        return predict_run(run, asked, fidelity=fidelity)

    monkeypatch.setattr(trials, "predict_run", recorded)
    return found


def test_a_run_is_simulated_once_and_counted(calls):
    asked = request(TWO)
    search = Trials(asked)
    run = COMPARED["disttrain"](asked)
    first = search.try_run(run, QUICK)
    spent = search.spent_seconds
    assert first is not None and spent > 0 and search.try_run(replace(run, planner="other"), QUICK) is first
    assert search.spent_seconds == spent and calls == [(asked.max_actions * QUICK.share, 1)]
    assert search.try_run(run, FINAL) is not None and search.spent_seconds > spent
    assert [each.run.key for each in search.fitting(FINAL)] == [run.key] and not search.fitting(RANKING)


def test_where_some_samples_are_very_heavy_more_of_a_step_is_simulated(calls):
    heavy = tuple(SampleLengths(index, (), 4096 if index == 0 else 64, 8) for index in range(32))
    asked = request(TEXT_ONLY, lengths=heavy)
    search, run = Trials(asked), PLANNERS["megatron"](asked)
    usual = Trials(request(TWO))
    assert search.has_heavy_samples and not usual.has_heavy_samples
    assert (search.cost_of_a_glance, usual.cost_of_a_glance) == (RANKING.share / QUICK.share, 1.0)
    for fidelity in (QUICK, RANKING, FINAL):
        search.try_run(run, fidelity)
    assert calls == [(asked.max_actions * RANKING.share, 1), (asked.max_actions, 1), (asked.max_actions, asked.num_batches)]
    assert [len(search.fitting(fidelity)) for fidelity in (QUICK, RANKING, FINAL)] == [1, 1, 1]


def test_the_bound_of_a_run_with_hidden_collectives_is_that_of_its_costs():
    sizes = FixedSizes(tensor_parallel_size=4)
    asked = request(TWO, fixed_sizes={"llm": sizes, "vision": sizes}, micro_batch_size=8)
    plain, hidden = (PLANNERS["megatron"](asked.changed(tp_comm_overlap=hides)) for hides in (False, True))
    assert hidden.tp_comm_overlap and hidden.transformer_impl == "local"
    search = Trials(asked)
    for run in (plain, hidden):
        assert search.least_step_seconds(run) < predict_run(run, asked).iteration_seconds
    assert search.least_step_seconds(hidden) != search.least_step_seconds(plain)


def test_what_does_not_fit_is_remembered_as_that():
    asked = request(TWO)
    run = COMPARED["disttrain"](asked)
    small = with_memory(asked, 0.01)
    search = Trials(small)
    assert search.try_run(run, QUICK) is None and search.fitting(QUICK) == []


def test_of_equal_steps_fewer_gpus_are_preferred_then_less_memory():
    run = COMPARED["disttrain"](request(TWO))
    fewer = COMPARED["disttrain"](request(TWO, num_gpus=4))
    assert fewer.num_gpus < run.num_gpus
    prediction = predict_run(run, request(TWO))
    leaner = replace(prediction, peak_memory_bytes=prediction.peak_memory_bytes - 1)
    rounded = replace(prediction, iteration_seconds=prediction.iteration_seconds * (1 + 1e-13), peak_memory_bytes=10**12)
    wanted = [PredictedRun(fewer, rounded), PredictedRun(run, leaner), PredictedRun(run, prediction)]
    assert sorted((wanted[2], wanted[0], wanted[1]), key=lambda each: each.key) == wanted


def test_glances_are_corrected_by_those_of_their_kind_that_were_simulated_more_closely():
    asked = request(TWO)
    apart, chain = (COMPARED[name](asked) for name in ("disttrain", "megatron-balanced"))
    search = Trials(asked)
    assert search.placed(apart) != search.placed(chain)
    prediction = predict_run(apart, asked)
    for run, glance, ranked in ((apart, 3.0, 6.0), (replace(apart, schedule="gpipe"), 3.5, None), (chain, 5.0, None)):
        search.keep(PredictedRun(run, replace(prediction, iteration_seconds=glance)), QUICK)
        if ranked:
            search.keep(PredictedRun(run, replace(prediction, iteration_seconds=ranked)), RANKING)
    assert search.corrections() == {search.placed(apart): 2.0}
    assert [each.prediction.iteration_seconds for each in search.fitting(QUICK)] == [3.0, 3.5, 5.0]
    assert [each.prediction.iteration_seconds for each in search.expected()] == [5.0, 6.0, 3.5], "the last one 7 s"
    search.found[chain.key, RANKING] = None
    assert search.corrections()[search.placed(chain)] == MISFIT, "it does not fit after all"
    assert [each.prediction.iteration_seconds for each in search.expected()] == [6.0, 5.0, 3.5], "6, 6.05 and 7 s"


def test_reductions_hide_behind_the_last_backward():
    asked, layout = request(TWO), even_layout(LLM, StageSize(1), 4, 2)
    whole = reduction_seconds(asked, "llm", layout)
    exposed = [exposed_reduction_seconds(asked, "llm", layout, stage_seconds=each * whole) for each in (0.0, 0.6, 60.0)]
    assert exposed[0] == pytest.approx(whole) and exposed == sorted(exposed, reverse=True)
    assert exposed[2] == pytest.approx(whole / 5), "the first of five layers"


def test_gradients_are_reduced_between_the_ranks_that_hold_them():
    asked, layout = request(TWO), even_layout(LLM, StageSize(1), 2, 1)
    inside, across = (reduction_seconds(asked, "llm", layout, first_rank=rank) for rank in (4, 3))
    assert inside == reduction_seconds(asked, "llm", layout) < across, "ranks 3 and 4 are on two nodes of 4"
    first = Candidate({"vision": even_layout(VISION, StageSize(1), 3, 1), "llm": layout})
    assert first.first_ranks == {"vision": 0, "llm": 3}
    alone = replace(first, layouts={"llm": layout, "vision": even_layout(VISION, StageSize(1), 3, 1)})
    assert alone.first_ranks == {"llm": 0, "vision": 2}
    assert estimate_seconds(asked, first) > estimate_seconds(asked, alone)


def test_variants_of_a_run_keep_to_the_request():
    asked = request(TWO, global_batch_size=24, fixed_sizes={"llm": FixedSizes(data_parallel_size=1)})
    run = replace(COMPARED["disttrain"](asked), micro_batch_size=4)
    assert [each.micro_batch_size for each in other_sizes(run, asked)] == [2, 8]
    assert list(other_sizes(run, asked.changed(micro_batch_size=4))) == []
    for each in other_passes(run, asked):
        assert set(run.passes) < set(each.passes) and each.plan == run.plan


PIPELINE = FixedSizes(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=1, virtual_pipeline_size=1)


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
    assert not list(other_partitions(COMPARED[planner](request()), request()))


def test_a_busy_stage_gives_a_layer_to_the_next_one_and_keeps_one_beside_its_end():
    asked = uneven_request()
    run = PLANNERS["optimus"](asked)
    assert run.plan.units["llm"].describe_ranges() == "[[[0, 3]], [[3, 5]]]"
    assert [each.plan.units["llm"].describe_ranges() for each in other_cuts(run, asked)] == ["[[[0, 2]], [[2, 5]]]"]


def test_the_search_ends_where_no_move_helps_and_tries_nothing_twice():
    asked, tried = uneven_request(), []
    even = PredictedRun(with_shares(PLANNERS["optimus"](asked)), predict_run(PLANNERS["optimus"](asked), asked))

    def judge(run: PlannedRun, _: PredictedRun) -> PredictedRun | None:
        tried.append(run.key)
        return None

    assert climb(even, near=partial(other_partitions, request=asked), judge=judge) == (even, len(tried))
    assert len(tried) == len(set(tried)) > 0
