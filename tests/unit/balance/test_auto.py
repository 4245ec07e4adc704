"""Which balancer a step is predicted to be shortest with, and whether another pair is clearly better than the chosen one."""

from dataclasses import replace
from random import Random

import pytest

from multimodal.balance import BALANCERS, placements_of, step_predictor
from multimodal.balance.auto import busiest_replicas_work
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.step_predictor import CLEARLY, StepPredictor, find_better_pair
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import ItemLengths, LengthBatch, SampleLengths
from multimodal.values.validate import validate_assignment

CLUSTER = Cluster(8, 100.0, 80.0, NodeLink(100.0, 1.0), Network(10.0, 5.0, 8))


def draw_batch(build_sample, seed):
    random = Random(seed)
    items = [[("vision", random.choice([16, 64, 640]))] * random.randint(0, 3) for _ in range(24)]
    return [build_sample(index, random.randint(5, 400), *each) for index, each in enumerate(items)]


def predictor(graph, plan):
    return StepPredictor(ScheduleCache(graph, plan, BUILDERS["1f1b"]), CLUSTER, 128)


@pytest.mark.deep(when=lambda seed: seed > 1)
@pytest.mark.parametrize("seed", range(8))
def test_auto_is_the_best_of_all_and_never_worse_than_none(graph, build_plan, build_sample, seed):
    plan = build_plan(vision=2, audio=1, llm=2)
    lengths = draw_batch(build_sample, seed)
    predict = predictor(graph, plan)
    options = BalanceOptions(micro_batch_size=3, predictor=predict, vocab_size=128)
    seconds = {
        name: predict.predict(balancer(lengths, graph=graph, plan=plan, options=options), lengths).seconds
        for name, balancer in BALANCERS.items()
    }
    assert seconds["auto"] <= min(seconds[name] for name in ("none", "orchmllm", "disttrain", "entrain"))
    gained = 1 - seconds["auto"] / seconds["none"]
    for margin in (0.9 * gained, 1.1 * gained):  # what exchanging was measured to lose
        careful = replace(options, predictor=replace(predict, margin=margin))
        assignment = BALANCERS["auto"](lengths, graph=graph, plan=plan, options=careful)
        kept = predict.predict(assignment, lengths).seconds
        assert kept == (seconds["none"] if 0 < gained < margin else seconds["auto"])


def test_images_that_move_tie_shared_ranks_together_and_auto_sees_it():
    """Under 1F1B each microbatch of a rank waits for the other rank's encoder; in DIP's phases it does not."""
    shape = {"num_layers": 6, "num_attention_heads": 4, "ffn_hidden_size": 768}
    vision = {"role": "encoder", "hidden_size": 192, **shape}
    graph = ModelGraph.from_dict({"units": {"vision": vision, "llm": {"role": "backbone", "hidden_size": 256, **shape}}})
    sizes = (80, 140, 72, 432, 24, 60, 32, 16, 36, 240, 192, 72, 180, 16, 60, 32)
    lengths = [SampleLengths(at, (ItemLengths("vision", size, size // 4),), 192 - size // 4, 90) for at, size in enumerate(sizes)]
    plan = plan_colocated(graph, sizes={name: UnitSizes(data_parallel_size=2) for name in graph.unit_names}, world_size=2)
    slow = replace(CLUSTER, peak_tflops=0.1)
    seconds = {}
    for builder in ("1f1b", "dip"):
        predict = StepPredictor(ScheduleCache(graph, plan, BUILDERS[builder]), slow, 128)
        options = BalanceOptions(micro_batch_size=2, predictor=predict, vocab_size=128)
        for name in ("none", "orchmllm", "auto"):
            assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
            seconds[builder, name] = predict.predict(assignment, lengths).seconds
    assert seconds["1f1b", "orchmllm"] > 1.2 * seconds["1f1b", "none"]
    assert seconds["dip", "orchmllm"] < seconds["1f1b", "none"]
    assert seconds["1f1b", "auto"] < 0.99 * seconds["1f1b", "none"]


@pytest.mark.deep(when=lambda seed: seed > 1)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", BALANCERS)
def test_the_quick_bound_is_below_the_prediction(graph, build_plan, build_sample, name, seed):
    plan = build_plan(vision=2, audio=1, llm=3)
    lengths = draw_batch(build_sample, seed)
    predict = predictor(graph, plan)
    assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=2))
    prediction = predict.predict(assignment, lengths)
    assert 0 < prediction.least_seconds <= prediction.seconds


@pytest.mark.parametrize("cp", [1, 2])
def test_steps_predicted_together_are_those_predicted_alone(graph, build_sample, cp):
    sizes = {name: UnitSizes(data_parallel_size=size) for name, size in {"vision": 2, "audio": 1}.items()}
    sizes["llm"] = UnitSizes(context_parallel_size=cp)
    plan = plan_disaggregated(graph, sizes=sizes, world_size=3 + cp)
    lengths = LengthBatch.of(draw_batch(build_sample, 3))
    options = [BalanceOptions(micro_batch_size=size) for size in (2, 3, 8)]
    assignments = [BALANCERS["orchmllm"](lengths, graph=graph, plan=plan, options=each) for each in options]
    together = predictor(graph, plan)
    found = together.predict_each(assignments, lengths)
    alone = [predictor(graph, plan).predict(each, lengths) for each in assignments]
    assert [each.least_seconds for each in found] == [each.least_seconds for each in alone]
    assert [each.seconds for each in found] == [each.seconds for each in alone]
    assert len({each.seconds for each in found}) == len(found)
    assert together.predict_each(assignments[::-1], lengths) == found[::-1]


@pytest.mark.parametrize("costs", [{}, {"llm": LengthCost(), "vision": LengthCost(CostForm.PADDED), "audio": LengthCost()}])
def test_without_a_predictor_the_busiest_replica_of_every_unit_counts(graph, build_plan, build_sample, costs):
    plan = build_plan(vision=2, audio=1, llm=2)
    lengths = draw_batch(build_sample, 1)
    options = BalanceOptions(micro_batch_size=3, unit_costs=costs)
    work = BatchWork(graph, lengths, options)
    found = {name: balancer(lengths, graph=graph, plan=plan, options=options) for name, balancer in BALANCERS.items()}
    busiest = {name: busiest_replicas_work(assignment, work, plan=plan) for name, assignment in found.items()}
    assert busiest["auto"] == min(busiest[name] for name in ("none", "orchmllm", "disttrain", "entrain"))
    validate_assignment(found["auto"], lengths, graph=graph, plan=plan)


def test_where_costs_are_declared_auto_balances_a_small_encoder_too(graph, build_plan, build_sample):
    plan = build_plan(vision=4, audio=1, llm=2)
    lengths = [build_sample(index, 4_000, ("vision", 16 if index % 4 else 256)) for index in range(16)]
    options = BalanceOptions(num_microbatches=4, unit_costs=dict.fromkeys(graph.unit_names, LengthCost()))
    tokens = [sample.items[0].num_tokens for sample in lengths]
    busiest = {}
    for name in ("none", "orchmllm", "auto"):
        replicas = BALANCERS[name](lengths, graph=graph, plan=plan, options=options).units["vision"]
        busiest[name] = max(sum(tokens[atom.sample_id] for batch in batches for atom in batch) for batches in replicas)
    assert busiest["auto"] == busiest["orchmllm"] < busiest["none"]


@pytest.mark.parametrize("schedule", ["1f1b", "optimus", "nested"])
def test_auto_judges_with_the_schedule_that_runs(graph, build_sample, schedule):
    """Encoders on both stages of the LLM: who encodes what is judged by the step in which they fill its bubbles."""
    encoder = UnitPlan(tuple(Replica((Stage((rank,), ((0, 3),)),)) for rank in (0, 1)))
    llm = UnitPlan((Replica((Stage((0,), ((0, 2),)), Stage((1,), ((2, 3),)))),))
    plan = Plan({"vision": encoder, "audio": encoder, "llm": llm})
    lengths = draw_batch(build_sample, 3)
    predict = StepPredictor(ScheduleCache(graph, plan, BUILDERS[schedule]), CLUSTER, 128)
    options = BalanceOptions(micro_batch_size=3, predictor=predict, vocab_size=128)
    found = {name: row(lengths, graph=graph, plan=plan, options=options) for name, row in BALANCERS.items()}
    seconds = {name: predict.predict(assignment, lengths).seconds for name, assignment in found.items()}
    placements = placements_of(tuple(plan.units.values()))
    assert seconds["auto"] <= min(seconds[name] for name, row in BALANCERS.items() if row.suits(placements))
    costs = predict.costs(found["auto"], lengths)
    run = build_schedule(BUILDERS[schedule].with_costs(costs), costs.shape)
    assert seconds["auto"] == simulate_schedule(run, costs).iteration_seconds


VISION = Unit("vision", Role.ENCODER, Transformer(4, 1024, 8, 4096), ImageInput(14, 2))
LLM = Unit("llm", Role.BACKBONE, Transformer(8, 1024, 8, 4096))
GRAPH = ModelGraph((VISION, LLM), (("vision", "llm"),))
OPTIONS = BalanceOptions(micro_batch_size=4, vocab_size=1024)
ONE = StageSize(1)
SHARED = Candidate({"vision": even_layout(VISION, ONE, 4, 1), "llm": even_layout(LLM, ONE, 4, 1)}, groups=(("vision", "llm"),))
APART = Candidate({"vision": even_layout(VISION, ONE, 2, 1), "llm": even_layout(LLM, ONE, 2, 2)})


def uneven_batch() -> list[SampleLengths]:
    draw = Random(0)
    items = [[ItemLengths("vision", 4 * count, count) for count in (draw.choice((50, 1500)),)] for _ in range(32)]
    return [SampleLengths(index, tuple(each), draw.randint(10, 400), 10) for index, each in enumerate(items)]


def pair_predictor(candidate: Candidate, schedule: str) -> StepPredictor:
    return StepPredictor(ScheduleCache(GRAPH, candidate.build_plan(GRAPH), BUILDERS[schedule]), CLUSTER, 1024)


def seconds(candidate: Candidate, balance: str, schedule: str) -> float:
    predict = pair_predictor(candidate, schedule)
    plan = predict.schedules.plan
    assignment = BALANCERS[balance](uneven_batch(), graph=GRAPH, plan=plan, options=OPTIONS)
    return predict.predict(assignment, uneven_batch()).seconds


def better_than(candidate: Candidate, balance: str, schedule: str):
    predict = pair_predictor(candidate, schedule)
    return find_better_pair(uneven_batch(), balance=balance, schedule=schedule, predictor=predict, options=OPTIONS)


@pytest.mark.deep(when=lambda schedule: schedule == "dip")
@pytest.mark.parametrize("candidate", [SHARED, APART])
@pytest.mark.parametrize("schedule", ["1f1b", "dip"])
@pytest.mark.parametrize("balance", [name for name, row in BALANCERS.items() if not row.needs_costs])
def test_what_is_found_is_clearly_better_and_both_figures_are_predictions(candidate, balance, schedule):
    found = better_than(candidate, balance, schedule)
    if found is None:
        placed = pair_predictor(candidate, schedule).schedules.plan
        tried = [name for name, row in BALANCERS.items() if row.suits(placements_of(tuple(placed.units.values())))]
        assert seconds(candidate, balance, schedule) <= CLEARLY * min(seconds(candidate, name, schedule) for name in tried)
        return
    chosen, better = found
    assert (chosen.balance, chosen.schedule) == (balance, schedule)
    assert (better.balance == balance) != (better.schedule == schedule)
    assert chosen.seconds == seconds(candidate, balance, schedule)
    assert better.seconds == seconds(candidate, better.balance, better.schedule) < chosen.seconds / CLEARLY
    assert better.keeps_more == (BUILDERS[better.schedule].in_flight > BUILDERS[schedule].in_flight)


def test_balancing_against_the_schedule_is_found():
    """Encoders balanced by themselves move work between microbatches that 1F1B waits for on ranks that units share."""
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert (better.balance, better.schedule, better.keeps_more) == ("whole-sample", "1f1b", False)
    assert better_than(SHARED, "whole-sample", "1f1b") is None and better_than(SHARED, "orchmllm", "dip") is None


def test_where_no_balancer_helps_another_schedule_does(monkeypatch):
    monkeypatch.setattr(step_predictor, "BALANCERS", {"orchmllm": BALANCERS["orchmllm"]})
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert (better.balance, better.schedule, better.keeps_more) == ("orchmllm", "nested", False)
    monkeypatch.setattr(step_predictor, "BUILDERS", {name: row for name, row in BUILDERS.items() if name != "nested"})
    _, better = better_than(SHARED, "orchmllm", "1f1b")
    assert better.balance == "orchmllm" and better.schedule != "1f1b" and better.keeps_more
    assert BUILDERS[better.schedule].splits_backwards is False


def test_nothing_is_said_of_auto_nor_of_steps_that_it_would_not_simulate(monkeypatch):
    assert better_than(SHARED, "auto", "1f1b") is None
    monkeypatch.setattr("multimodal.balance.step_predictor.MOST_SIMULATED_COMPUTATIONS", 0)
    assert better_than(SHARED, "sorted", "1f1b") is None
