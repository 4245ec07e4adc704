"""The search against every other planner at its own best microbatch size and with its own best balancer."""

import random
from dataclasses import replace

import pytest

from multimodal.balance import UNBALANCED
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.braid import CHANCE, PlanSearch
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.run_variants import neighbours
from multimodal.plan.planners.search.simulated_part import FINAL, RANKING
from multimodal.plan.planners.search.trials import Trials
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import GRAPHS, TEXT_ONLY, random_lengths, request, with_memory


def random_request(seed: int) -> PlanningRequest:
    draw = random.Random(seed)
    graph = GRAPHS[draw.choice(["text-only", "two", "three", "two-encoders"])]
    lengths = random_lengths(graph, count=draw.choice((1, 8, 16)), seed=seed)
    asked = request(
        graph,
        num_gpus=draw.choice((2, 4, 6)),
        global_batch_size=draw.choice((6, 8, 12)),
        lengths=lengths,
        micro_batch_size=draw.choice((None, None, None, 2)),
        time_budget_seconds=draw.choice((0.2, 0.6)),
        num_batches=draw.choice((1, 2)),
    )
    return with_memory(asked, draw.choice((4.0, 16.0)))


@pytest.mark.deep(when=lambda seed: seed >= 1)
@pytest.mark.parametrize("seed", range(12))
def test_no_planner_is_better_on_a_random_request(seed):
    asked = random_request(seed)
    best = PLANNERS["braid"].plan_best(asked).prediction.iteration_seconds
    for name, row in PLANNERS.items():
        try:
            run, prediction = row.plan_best(asked)
        except PlanError:
            continue
        if not run.repeats_encoders:
            assert best <= prediction.iteration_seconds * (1 + 1e-9), name


def test_a_tuned_planner_takes_the_best_microbatch_size_and_balancer():
    lengths = tuple(replace(sample, items=()) for sample in random_lengths(TEXT_ONLY, count=64, seed=3))
    asked = request(TEXT_ONLY, num_gpus=4, global_batch_size=64, lengths=lengths)
    by_size = {size: PLANNERS["disttrain"].plan_best(asked.changed(micro_batch_size=size)) for size in (1, 2, 4, 8, 16)}
    tuned = PLANNERS["disttrain"].plan_best(asked)
    seconds = {size: prediction.iteration_seconds for size, (_, prediction) in by_size.items()}
    assert tuned.prediction.iteration_seconds <= min(seconds.values()) * (1 + 1e-9) < seconds[1]
    assert tuned.run.balance != UNBALANCED


def test_the_bound_of_a_run_is_below_its_step():
    asked = request(num_gpus=2, global_batch_size=8)
    trials = Trials(asked)
    for name, row in PLANNERS.items():
        run, prediction = row.plan_best(asked)
        assert 0 < trials.least_step_seconds(run) <= prediction.iteration_seconds, name


@pytest.mark.parametrize("planner", ["megatron", "disttrain"])
def test_one_flag_is_changed_until_no_neighbour_is_better(planner: str):
    asked = request(num_gpus=8, global_batch_size=16, lengths=random_lengths(GRAPHS["two"], count=16, seed=5))
    search = PlanSearch(asked.changed(time_budget_seconds=0.0))
    first = search.trials.try_run(PLANNERS[planner](asked), FINAL)
    assert first is not None
    best = search.settle(first)
    assert best.key < first.key
    ranked = search.trials.try_run(best.run, RANKING)
    assert ranked is not None
    others = [*neighbours(best.run, asked)]
    assert len(others) <= search.num_neighbours
    for other in others:
        near = search.trials.try_run(other, RANKING)
        if near is not None and near.prediction.iteration_seconds <= CHANCE * ranked.prediction.iteration_seconds:
            judged = search.trials.try_run(other, FINAL)
            assert judged is None or judged.key >= best.key, other.flags
