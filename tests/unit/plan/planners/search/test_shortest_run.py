"""Runs between which a planner's formula cannot decide: the one that is simulated to be shortest."""

from dataclasses import replace
from functools import partial

import pytest

from multimodal.plan.planners.baselines import plan_encoders_colocated
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.step_estimate import choose_near
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.search import trials
from multimodal.plan.planners.search.run_variants import with_first_balance
from multimodal.plan.planners.search.trials import shortest_run, simulate_run
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import TWO_ENCODERS, request


class Sized:
    """A candidate of so many GPUs and seconds."""

    def __init__(self, num_gpus: int, seconds: float, is_small: bool = True) -> None:
        self.num_gpus, self.seconds, self.is_small = num_gpus, seconds, is_small

    def fits(self, asked) -> bool:
        return self.is_small


def test_near_candidates_are_those_within_a_factor_of_the_best_that_fits():
    asked = request(num_gpus=8)
    slow, best, near, equal, huge, unfit = (
        Sized(*each) for each in ((4, 1.3), (4, 1.0), (2, 1.09), (2, 1.0), (16, 0.1), (8, 0.5, False))
    )
    given = {"seconds": lambda _, each: each.seconds}
    candidates = [slow, best, huge, near, unfit, equal]
    assert choose_near(asked, candidates, **given, within=1.1) == [(equal, 1.0), (best, 1.0), (near, 1.09)]
    assert choose_near(asked, candidates, **given)[0] == (equal, 1.0)
    assert choose_near(asked, candidates, **given, least_seconds=lambda _, each: each.seconds, within=1.1)[-1] == (near, 1.09)
    with pytest.raises(PlanError):
        choose_near(asked, [huge, unfit], **given)


def simulated_seconds(run: PlannedRun, asked) -> float:
    found = simulate_run(with_first_balance(run, asked), asked)[0]
    return found.prediction.iteration_seconds if found else float("inf")


def test_the_best_of_each_number_of_replicas_is_simulated(monkeypatch):
    """With a factor so large that the formula decides nothing."""
    asked = request(TWO_ENCODERS, num_gpus=8)
    monkeypatch.setattr("multimodal.plan.planners.baselines.NEAR", 3.0)
    made: list[PlannedRun] = []
    make = Candidate.to_run
    monkeypatch.setattr(Candidate, "to_run", lambda *given, **named: made.append(make(*given, **named)) or made[-1])
    chosen = plan_encoders_colocated(asked)
    replicas = [run.plan.units["llm"].data_parallel_size for run in made]
    assert len(replicas) > 1 and len(set(replicas)) == len(replicas)
    seconds = {run.key: simulated_seconds(run, asked) for run in made}
    assert seconds[chosen.key] == min(seconds.values())
    assert chosen.nominal_seconds > 0


def test_one_run_is_not_simulated_and_the_first_is_taken_where_none_fits(monkeypatch):
    asked = request(TWO_ENCODERS, num_gpus=8)
    run = plan_encoders_colocated(asked)
    other = replace(run, micro_batch_size=run.micro_batch_size * 2)
    without_memory = partial(asked.changed, memory_scale=1e-6)
    assert shortest_run([other, run], without_memory()).key == other.key
    monkeypatch.setattr(trials, "simulate_run", lambda *_: pytest.fail("it was simulated"))
    assert shortest_run([run], asked) is run
