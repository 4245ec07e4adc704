"""What a search tries, as rows of schedules and balancers say it."""

from dataclasses import replace

import pytest

from multimodal.balance import BALANCERS
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.braid import PlanSearch
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.simulated_part import QUICK, RANKING
from multimodal.plan.planners.search.trials import Trials
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.schedule.builders.zb_v import is_v_shaped
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, TWO, request

UNLIMITED = float("inf")


def varied(asked, planner):
    """Search the variants of one planner's plan."""
    search = PlanSearch(asked.changed(time_budget_seconds=UNLIMITED))
    search.rank_others([PLANNERS[planner]])
    search.vary_best()
    return [tried.run for tried in search.trials.fitting(QUICK)]


def test_all_balancers_that_suit_are_tried():
    tried = {run.balance for run in varied(request(TWO, num_gpus=8), "disttrain")}
    assert tried == {name for name, row in BALANCERS.items() if not row.needs_costs and not row.is_for_these_alone}


def test_where_glances_cost_more_variants_get_more_of_a_spent_budget(monkeypatch):
    def count(asked):
        search = PlanSearch(asked.changed(time_budget_seconds=0.1))
        search.trials.spent_seconds = 0.1
        search.rank_others([PLANNERS["megatron"]])
        known = len(search.trials.found)
        search.vary_best()
        return len(search.trials.found) - known

    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(pipeline_parallel_size=2, virtual_stages=1)})
    usual = count(asked)
    monkeypatch.setattr(Trials, "cost_of_a_glance", 5.0)
    assert 0 < usual < count(asked)


@pytest.mark.deep(when=lambda longest: longest == 64)
@pytest.mark.parametrize(("longest", "seconds"), [(64, "0.5 s"), (4096, "1 s")])
def test_a_search_with_very_heavy_samples_has_twice_the_budget(longest, seconds):
    said = []
    lengths = tuple(SampleLengths(index, (), longest if index == 0 else 64, 8) for index in range(32))
    PLANNERS["braid"](request(TEXT_ONLY, lengths=lengths, num_gpus=2, global_batch_size=8, on_progress=said.append))
    assert said and all(f"of {seconds}: best so far" in line for line in said)


def test_all_schedules_for_single_ranges_are_tried():
    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(pipeline_parallel_size=2, virtual_stages=1)})
    tried = {run.schedule for run in varied(asked, "megatron")}
    wanted = {
        name for name, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.EXPECTED and not row.fewest_encoders
    }
    assert tried == wanted and "gpipe" in tried


def test_all_schedules_for_virtual_stages_are_tried_and_zb_v_on_folded_ones():
    sizes = FixedSizes(pipeline_parallel_size=2, virtual_stages=2)
    runs = varied(request(TEXT_ONLY, fixed_sizes={"llm": sizes}), "megatron-balanced")
    assert {run.schedule for run in runs} == {
        name
        for name, row in BUILDERS.items()
        if row.virtual_stages is not VirtualStages.NO_USE and (row.fills_memory or not row.needs_costs)
    }
    for run in runs:
        assert not BUILDERS[run.schedule].is_folded or is_v_shaped(run.plan.units["llm"])


def searched(*glances):
    """Return a search that has glanced at runs, which seemed to take so many seconds."""
    search = PlanSearch(request(TWO, time_budget_seconds=UNLIMITED))
    prediction = predict_run(glances[0][0], search.request)
    for run, seconds in glances:
        search.trials.keep(PredictedRun(run, replace(prediction, iteration_seconds=seconds)), QUICK)
    return search


def test_the_best_of_each_close_kind_of_plan_is_varied_before_others_of_its_kind():
    apart, chain = (PLANNERS[name](request(TWO)) for name in ("disttrain", "megatron-balanced"))
    second = replace(apart, schedule="gpipe")
    search = searched((apart, 3.0), (second, 3.1), (chain, 3.2))
    assert search.trials.placed(apart) != search.trials.placed(chain)
    for wanted in (apart, chain, second, None):
        assert search.next_to_vary() == wanted
        if wanted:
            search.varied[wanted.key] = search.trials.placed(wanted)
    far = searched((apart, 3.0), (second, 3.1), (chain, 3.4))
    far.varied[apart.key] = far.trials.placed(apart)
    assert far.next_to_vary() == second, "the other kind is more than a tenth longer"


def test_a_run_that_does_not_fit_is_left_for_one_that_does_even_if_that_takes_longer():
    run = PLANNERS["disttrain"](request(TWO))
    shorter, longer = replace(run, schedule="gpipe"), replace(run, micro_batch_size=2 * run.micro_batch_size)
    search = searched((run, 3.0), (shorter, 2.0), (longer, 3.5))
    glances = search.trials.fitting(QUICK)[2:]
    assert search.closer_variant(run, glances) is None, "a variant that takes longer"
    search.trials.found[run.key, RANKING] = None
    found = search.closer_variant(run, glances)
    assert found is not None and found.run == longer
