"""The search against every other planner at its own best microbatch size and with its own best balancer."""

import random

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import GRAPHS, random_lengths, request, with_memory


def random_request(seed: int) -> PlanningRequest:
    draw = random.Random(seed)
    graph = GRAPHS[draw.choice(list(GRAPHS))]
    lengths = random_lengths(graph, count=draw.choice((1, 8, 24)), seed=seed)
    asked = request(
        graph,
        num_gpus=draw.choice((2, 4, 6, 8, 12)),
        global_batch_size=draw.choice((8, 12, 24, 32)),
        lengths=lengths,
        micro_batch_size=draw.choice((None, None, None, 2)),
        time_budget_seconds=draw.choice((0.2, 1.0)),
        num_batches=draw.choice((1, 2)),
    )
    return with_memory(asked, draw.choice((2.0, 16.0)))


@pytest.mark.parametrize("seed", range(12))
def test_no_planner_is_better_on_a_random_request(seed):
    asked = random_request(seed)
    best = PLANNERS["braid"].plan_best(asked, max_actions=asked.max_actions).prediction.iteration_seconds
    for name, row in PLANNERS.items():
        try:
            run, prediction = row.plan_best(asked, max_actions=asked.max_actions)
        except PlanError:
            continue
        if BUILDERS[run.schedule].can_train:
            assert best <= prediction.iteration_seconds * (1 + 1e-9), name


def test_a_tuned_planner_takes_the_best_microbatch_size_and_balancer():
    asked = request(num_gpus=4, global_batch_size=32)
    tuned = PLANNERS["megatron"].plan_best(asked, max_actions=asked.max_actions)
    plain = PLANNERS["megatron"].plan_best(
        asked.changed(micro_batch_size=1), max_actions=asked.max_actions
    )
    assert plain.run.micro_batch_size == 1 < tuned.run.micro_batch_size
    assert tuned.run.balance != "none"
    assert tuned.prediction.iteration_seconds < plain.prediction.iteration_seconds
