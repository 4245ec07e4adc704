"""What a search tries, as rows of schedules and balancers say it."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from benchmarks.baselines import COMPARED
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.plan.planners import PLANNERS, plan_or_advise
from multimodal.plan.planners.allowed_sizes import fewest_enough
from multimodal.plan.planners.braid import PlanSearch
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest, StageSize
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, plan_per_gpu, plan_to_fit
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.plan.planners.search.run_variants import neighbours, other_encoder_sizes
from multimodal.plan.planners.search.simulated_part import FINAL, QUICK, RANKING
from multimodal.plan.planners.search.trials import Trials
from multimodal.plan.planners.search.unit_sizes import other_unit_sizes
from multimodal.plan.plans_of_sizes import place_stages
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.schedule.builders.zb_v import is_v_shaped
from multimodal.values.errors import PlanError
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_plan
from tests.unit.plan.planners.planning_cases import (
    GRAPHS,
    LLM,
    TEXT_ONLY,
    TWO,
    VISION,
    few_planners,
    random_lengths,
    request,
    with_memory,
)
from tests.unit.plan.planners.test_context_parallel_plans import without_items

UNLIMITED = float("inf")


def varied(asked, planner):
    search = PlanSearch(asked.changed(time_budget_seconds=UNLIMITED))
    search.rank_others([COMPARED[planner]])
    search.vary_best()
    return [tried.run for tried in search.trials.fitting(QUICK)]


def test_all_balancers_that_suit_are_tried():
    tried = {run.balance for run in varied(request(TWO, num_gpus=2, global_batch_size=8), "disttrain")}
    assert tried == {name for name, row in BALANCERS.items() if not row.needs_costs and not row.is_for_these_alone}


def test_where_glances_cost_more_variants_get_more_of_a_spent_budget(monkeypatch):
    def count(asked):
        search = PlanSearch(asked.changed(time_budget_seconds=0.1))
        search.trials.spent_seconds = 0.1
        search.rank_others([COMPARED["megatron"]])
        known = len(search.trials.found)
        search.vary_best()
        return len(search.trials.found) - known

    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(pipeline_parallel_size=2, virtual_pipeline_size=1)})
    usual = count(asked)
    monkeypatch.setattr(Trials, "cost_of_a_glance", 5.0)
    assert 0 < usual < count(asked)


@pytest.mark.deep(when=lambda longest: longest == 64)
@pytest.mark.parametrize(("longest", "seconds"), [(64, "0.5 s"), (4096, "1 s")])
def test_a_search_with_very_heavy_samples_has_twice_the_budget(longest, seconds):
    said = []
    lengths = tuple(SampleLengths(index, (), longest if index == 0 else 64, 8) for index in range(32))
    COMPARED["braid"](request(TEXT_ONLY, lengths=lengths, num_gpus=2, global_batch_size=8, on_progress=said.append))
    assert said and all(f"of {seconds}: best so far" in line for line in said)


def test_all_schedules_for_single_ranges_are_tried():
    asked = request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(pipeline_parallel_size=2, virtual_pipeline_size=1)})
    tried = {run.schedule for run in varied(asked, "megatron")}
    wanted = {
        name for name, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.EXPECTED and not row.fewest_encoders
    }
    assert tried == wanted and "gpipe" in tried


def test_all_schedules_for_virtual_stages_are_tried_and_zb_v_on_folded_ones():
    sizes = FixedSizes(pipeline_parallel_size=2, virtual_pipeline_size=2)
    runs = varied(request(TEXT_ONLY, fixed_sizes={"llm": sizes}), "megatron-balanced")
    assert {run.schedule for run in runs} == {
        name
        for name, row in BUILDERS.items()
        if row.virtual_stages is not VirtualStages.NO_USE and (row.fills_memory or not row.needs_costs)
    }
    for run in runs:
        assert not BUILDERS[run.schedule].is_folded or is_v_shaped(run.plan.units["llm"])


def test_schedules_that_need_waits_are_not_tried_where_every_rank_holds_the_whole_model():
    runs = list(varied(request(TEXT_ONLY, fixed_sizes={"llm": FixedSizes(pipeline_parallel_size=1)}), "megatron"))
    assert all(run.plan.is_whole_on_every_rank for run in runs)
    assert {"1f1b", "gpipe"} <= {run.schedule for run in runs}
    assert not any(BUILDERS[run.schedule].splits_backwards or BUILDERS[run.schedule].needs_messages for run in runs)


def searched(*glances):
    """Return a search that has glanced at runs, which seemed to take so many seconds."""
    search = PlanSearch(request(TWO, time_budget_seconds=UNLIMITED))
    prediction = predict_run(glances[0][0], search.request)
    for run, seconds in glances:
        search.trials.keep(PredictedRun(run, replace(prediction, iteration_seconds=seconds)), QUICK)
    return search


def test_the_best_of_each_close_kind_of_plan_is_varied_before_others_of_its_kind():
    apart, chain = (COMPARED[name](request(TWO)) for name in ("disttrain", "megatron-balanced"))
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
    run = COMPARED["disttrain"](request(TWO))
    shorter, longer = replace(run, schedule="gpipe"), replace(run, micro_batch_size=2 * run.micro_batch_size)
    search = searched((run, 3.0), (shorter, 2.0), (longer, 3.5))
    glances = search.trials.fitting(QUICK)[2:]
    assert search.closer_variant(run, glances) is None, "a variant that takes longer"
    search.trials.found[run.key, RANKING] = None
    found = search.closer_variant(run, glances)
    assert found is not None and found.run == longer


def random_request(seed: int) -> PlanningRequest:
    draw = random.Random(seed)
    graph = GRAPHS[draw.choice(["text-only", "two", "three", "two-encoders"])]
    lengths = random_lengths(graph, count=draw.choice((1, 8, 16)), seed=seed)
    drawn = {"num_gpus": draw.choice((2, 4, 6)), "global_batch_size": draw.choice((6, 8, 12))}
    drawn |= {"micro_batch_size": draw.choice((None, None, None, 2)), "time_budget_seconds": draw.choice((0.2, 0.6))}
    asked = request(graph, lengths=lengths, **drawn, num_batches=draw.choice((1, 2)))
    return with_memory(asked, draw.choice((4.0, 16.0)))


@pytest.mark.deep(when=lambda seed: seed >= 1)
@pytest.mark.parametrize("seed", range(12))
def test_no_planner_is_better_on_a_random_request(seed):
    asked = random_request(seed)
    best = COMPARED["braid"].plan_best(asked).prediction.iteration_seconds
    for name, row in PLANNERS.items():
        try:
            prediction = row.plan_best(asked).prediction
        except PlanError:
            continue
        assert best <= prediction.iteration_seconds * (1 + 1e-9), name


def test_a_tuned_planner_takes_the_best_microbatch_size_and_balancer():
    lengths = tuple(replace(sample, items=()) for sample in random_lengths(TEXT_ONLY, count=64, seed=3))
    asked = request(TEXT_ONLY, num_gpus=4, global_batch_size=64, lengths=lengths)
    by_size = {size: COMPARED["disttrain"].plan_best(asked.changed(micro_batch_size=size)) for size in (1, 2, 4, 8, 16)}
    tuned = COMPARED["disttrain"].plan_best(asked)
    seconds = {size: prediction.iteration_seconds for size, (_, prediction) in by_size.items()}
    assert tuned.prediction.iteration_seconds <= min(seconds.values()) * (1 + 1e-9) < seconds[1]
    assert tuned.run.balance != UNBALANCED


@pytest.mark.deep(when=lambda name: name not in ("disttrain", "megatron-balanced", "optimus"))
@pytest.mark.parametrize("name", COMPARED)
def test_the_bound_of_a_run_is_below_its_step(name):
    asked = request(num_gpus=2, global_batch_size=8, time_budget_seconds=0.1)
    run = COMPARED[name](asked)
    assert 0 < Trials(asked).least_step_seconds(run) <= predict_run(run, asked).iteration_seconds


@pytest.mark.deep(when=lambda planner: planner == "disttrain")
@pytest.mark.parametrize("planner", ["megatron", "disttrain"])
def test_one_flag_is_changed_until_no_neighbour_is_better(planner: str):
    asked = request(num_gpus=4, global_batch_size=8, lengths=random_lengths(GRAPHS["two"], count=16, seed=5))
    search = PlanSearch(asked.changed(time_budget_seconds=0.0))
    first = search.trials.try_run(COMPARED[planner](asked), FINAL)
    assert first is not None
    best = search.settle(first)
    assert best.key < first.key
    check_neighbours(best, search.request)
    assert search.num_neighbours >= len([*neighbours(best.run, search.request)])


@pytest.mark.deep(when=lambda seed: seed != 3)
@pytest.mark.parametrize("seed", [1, 2, 3, 5])
@few_planners()
def test_no_neighbour_of_a_plan_is_better(seed: int) -> None:
    asked = random_request(seed)
    best = COMPARED["braid"].plan_best(asked)
    check_neighbours(best, PlanSearch(asked).request)
    assert re.search(r"no neighbour is better \(\d+ tried\)", best.run.notes[0])


def check_neighbours(best: PredictedRun, asked: PlanningRequest) -> None:
    trials = Trials(asked)
    for other in neighbours(best.run, asked):
        judged = trials.try_run(other, FINAL)
        assert judged is None or judged.key >= best.key, other.flags


def sizes(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    for name, unit in plan.units.items():
        yield name, unit.tensor_parallel_size, len(unit.replicas[0].stages), unit.data_parallel_size


def is_near(each: Sequence[int], own: Sequence[int], may_give_ranks_back: bool) -> bool:
    ratios = sorted(one / other for one, other in zip(each, own, strict=True))
    return ratios == [0.5, 1, 2] or (may_give_ranks_back and ratios == [0.5, 1, 1])


@pytest.mark.parametrize("kind", ["own ranks", "shared ranks", "a chain"])
def test_one_unit_alone_gets_every_size_a_factor_away(kind: str) -> None:
    layouts = {"vision": even_layout(VISION, StageSize(1), 2, 2), "llm": even_layout(LLM, StageSize(2), 2, 1)}
    plan = Candidate(layouts, (("vision", "llm"),) if kind == "shared ranks" else ()).build_plan(TWO)
    if kind == "a chain":
        held = {"vision": {0: [(0, 5)], 1: [(5, 8)]}, "llm": {1: [(0, 4)], 2: [(4, 10)]}}
        plan = Plan({name: place_stages(each, tensor=1, context=1, data=2) for name, each in held.items()})
    asked = request(TWO, num_gpus=plan.num_ranks)
    run = replace(COMPARED["disttrain"](asked), plan=plan)
    for name, *own in sizes(plan):
        found = {tuple(each) for other in other_unit_sizes(run, asked) for unit, *each in sizes(other.plan) if unit == name}
        assert found - {tuple(own)} == {each for each in product((1, 2, 4), repeat=3) if is_near(each, own, kind == "own ranks")}
        assert len(found) > 2
    for other in other_unit_sizes(run, asked):
        validate_plan(other.plan, graph=TWO, world_size=other.num_gpus)
        assert sum(one != two for one, two in zip(sizes(plan), sizes(other.plan), strict=True)) == 1


def test_encoders_get_smaller_and_larger_microbatches_or_follow_the_llm() -> None:
    lengths = tuple(replace(each, items=(ItemLengths("vision", 64, 16),) * 2) for each in random_lengths(TWO))
    asked = request(TWO, lengths=lengths)
    run = replace(COMPARED["disttrain"](asked), micro_batch_size=4)
    found = [each.encoder_micro_batch_sizes for each in other_encoder_sizes(run, asked)]
    assert found == [(("vision", size),) for size in (4, 8, 16)]
    given = replace(run, encoder_micro_batch_sizes=(("vision", 5),))
    assert "--vision-micro-batch-size 5" in given.training_flags("cluster.yaml")
    assert "--encoder-micro-batch-sizes vision=5" in given.simulation_flags
    found = [dict(each.encoder_micro_batch_sizes).get("vision") for each in other_encoder_sizes(given, asked)]
    assert found == [None, 2, 4, 6, 10]


def advised(name: str, asked: PlanningRequest) -> int:
    with pytest.raises(PlanError) as caught:
        plan_or_advise(COMPARED[name], asked)
    found = re.search(r"; (\d+) GPUs would be enough$", str(caught.value))
    assert found, caught.value
    return int(found[1])


def test_the_fewest_that_work_are_found_up_to_a_limit() -> None:
    search = partial(fewest_enough, too_few=0, first=1, most=64)
    assert [search(lambda number, least=least: number >= least) for least in range(1, 66)] == [*range(1, 65), None]


CASES = [(name, graph) for name in COMPARED for graph in ("text-only", "two", "three") if (name, graph) != ("braid", "three")]
SOME = {*((name, "two") for name in ("disttrain", "megatron", "entrain")), ("disttrain", "three")}


@pytest.mark.deep(when=lambda name, graph: (name, graph) not in SOME)
@pytest.mark.parametrize(("name", "graph"), CASES)
def test_the_advised_number_is_enough_and_one_fewer_is_not(name: str, graph: str) -> None:
    asked = with_memory(request(GRAPHS[graph], num_gpus=1, time_budget_seconds=0.1), 0.8)
    enough = advised(name, asked)
    assert enough > 1
    found = plan_to_fit(COMPARED[name], replace(asked, num_gpus=enough))
    assert found.run.num_gpus <= enough and found.prediction.peak_memory_bytes <= asked.memory_bytes
    with pytest.raises(PlanError):
        plan_to_fit(COMPARED[name], replace(asked, num_gpus=enough - 1))


@pytest.mark.parametrize("name", ["disttrain", "megatron"])
def test_recomputation_counts_where_nothing_else_fits(name: str) -> None:
    """The planner alone needs more GPUs than with whole layers recomputed, which is tried before it gives up."""
    asked = with_memory(request(TWO, num_gpus=1, micro_batch_size=8), 0.8)
    enough = replace(asked, num_gpus=advised(name, asked))
    assert plan_to_fit(COMPARED[name], enough).run.recompute == "full"


def test_units_without_work_are_no_reason_for_more_gpus() -> None:
    idle = with_memory(without_items(GRAPHS["three"], "generator", num_gpus=1), 2.0)
    assert advised("disttrain", idle) == advised("disttrain", replace(idle, graph=TWO))


def test_fixed_sizes_that_need_more_gpus_say_how_many() -> None:
    fixed = FixedSizes(tensor_parallel_size=4, pipeline_parallel_size=2)
    assert advised("megatron", request(GRAPHS["text-only"], num_gpus=2, fixed_sizes={"llm": fixed})) == 8


def test_the_card_and_what_may_be_used_of_it_are_named() -> None:
    asked = with_memory(request(TWO, num_gpus=1, memory_headroom=0.25), 1.0)
    plain = partial(plan_to_fit, COMPARED["disttrain"])
    for plan in (plain, COMPARED["disttrain"].plan_best, partial(plan_per_gpu, plain)):
        with pytest.raises(PlanError, match=r"no plan on 1 GPU fits the 1 GB of each, of which 0.75 GB may be used .* be enough"):
            plan_or_advise(COMPARED["disttrain"], asked, plan=plan)


@pytest.mark.deep(when=lambda name: name not in ("alpa", "disttrain", "megatron"))
@pytest.mark.parametrize("name", COMPARED)
def test_what_never_fits_is_named(name: str) -> None:
    asked = with_memory(request(TWO), 0.002)
    with pytest.raises(PlanError, match=r"unit 'vision' does not fit at any tensor, pipeline or data parallel size"):
        plan_or_advise(COMPARED[name], asked)


def test_a_contradiction_gets_no_advice() -> None:
    sizes = {"vision": FixedSizes(tensor_parallel_size=1), "llm": FixedSizes(tensor_parallel_size=2)}
    with pytest.raises(PlanError, match=r"gives vision and llm one tensor parallel size") as caught:
        plan_or_advise(COMPARED["megatron-balanced"], request(TWO, fixed_sizes=sizes))
    assert "enough" not in str(caught.value)
