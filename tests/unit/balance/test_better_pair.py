"""Whether another balancer or schedule is predicted to be clearly better than the chosen pair."""

from random import Random

import pytest

from multimodal.balance import BALANCERS, better_pair
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.better_pair import CLEARLY, find_better_pair
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

CLUSTER = Cluster(8, 100.0, 80.0, NodeLink(100.0, 1.0), Network(10.0, 5.0, 8))
VISION = Unit("vision", Role.ENCODER, Transformer(4, 1024, 8, 4096), ImageInput(14, 2))
LLM = Unit("llm", Role.BACKBONE, Transformer(8, 1024, 8, 4096))
GRAPH = ModelGraph((VISION, LLM), (("vision", "llm"),))
OPTIONS = BalanceOptions(micro_batch_size=4, vocab_size=1024)
SHARED = Candidate({"vision": even_layout(VISION, 1, 4, 1), "llm": even_layout(LLM, 1, 4, 1)}, groups=(("vision", "llm"),))
APART = Candidate({"vision": even_layout(VISION, 1, 2, 1), "llm": even_layout(LLM, 1, 2, 2)})


def uneven_batch() -> list[SampleLengths]:
    draw = Random(0)
    items = [[ItemLengths("vision", 4 * count, count) for count in (draw.choice((50, 1500)),)] for _ in range(32)]
    return [SampleLengths(index, tuple(each), draw.randint(10, 400), 10) for index, each in enumerate(items)]


def predictor(candidate: Candidate, schedule: str) -> StepPredictor:
    return StepPredictor(ScheduleCache(GRAPH, candidate.build_plan(GRAPH), BUILDERS[schedule]), CLUSTER, 1024)


def seconds(candidate: Candidate, balance: str, schedule: str) -> float:
    predict = predictor(candidate, schedule)
    plan = predict.schedules.plan
    assignment = BALANCERS[balance](uneven_batch(), graph=GRAPH, plan=plan, options=OPTIONS)
    return predict.predict(assignment, uneven_batch()).seconds


def better_than(candidate: Candidate, balance: str, schedule: str):
    predict = predictor(candidate, schedule)
    return find_better_pair(uneven_batch(), balance=balance, schedule=schedule, predictor=predict, options=OPTIONS)


@pytest.mark.parametrize("candidate", [SHARED, APART])
@pytest.mark.parametrize("schedule", ["1f1b", "dip"])
@pytest.mark.parametrize("balance", [name for name, row in BALANCERS.items() if not row.needs_costs])
def test_what_is_found_is_clearly_better_and_both_figures_are_predictions(
    candidate: Candidate, balance: str, schedule: str
) -> None:
    found = better_than(candidate, balance, schedule)
    if found is None:
        placed = predictor(candidate, schedule).schedules.plan
        tried = [name for name, row in BALANCERS.items() if row.suits(better_pair.placements_of(tuple(placed.units.values())))]
        assert seconds(candidate, balance, schedule) <= CLEARLY * min(seconds(candidate, name, schedule) for name in tried)
        return
    chosen, better = found
    assert (chosen.balance, chosen.schedule) == (balance, schedule)
    assert (better.balance == balance) != (better.schedule == schedule)
    assert chosen.seconds == seconds(candidate, balance, schedule)
    assert better.seconds == seconds(candidate, better.balance, better.schedule) < chosen.seconds / CLEARLY
    assert better.keeps_more == (BUILDERS[better.schedule].in_flight > BUILDERS[schedule].in_flight)


def test_balancing_against_the_schedule_is_found() -> None:
    """Encoders balanced by themselves move work between microbatches that 1F1B waits for on ranks that units share."""
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert (better.balance, better.schedule, better.keeps_more) == ("whole-sample", "1f1b", False)
    assert better_than(SHARED, "whole-sample", "1f1b") is None and better_than(SHARED, "orchmllm", "dip") is None


def test_where_no_balancer_helps_another_schedule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(better_pair, "BALANCERS", {"orchmllm": BALANCERS["orchmllm"]})
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert (better.balance, better.schedule, better.keeps_more) == ("orchmllm", "nested", False)
    monkeypatch.setattr(better_pair, "BUILDERS", {name: row for name, row in BUILDERS.items() if name != "nested"})
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert better.balance == "orchmllm" and better.schedule != "1f1b" and better.keeps_more
    assert BUILDERS[better.schedule].splits_backwards is False


def test_nothing_is_said_of_auto_nor_of_steps_that_it_would_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert better_than(SHARED, "auto", "1f1b") is None
    monkeypatch.setattr("multimodal.balance.step_predictor.MOST_SIMULATED_COMPUTATIONS", 0)
    assert better_than(SHARED, "sorted", "1f1b") is None
