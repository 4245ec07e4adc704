"""Who encodes what: microbatches dealt over encoder pipelines by the idle time of their ranks."""

from itertools import product
from random import Random

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.encoder_pipelines import deal_by_idle_time, lane_seconds
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import validate_assignment

CLUSTER = Cluster(8, 1.0, 80.0, NodeLink(100.0, 1.0), Network(10.0, 5.0, 8))
SHAPE = {"num_layers": 6, "hidden_size": 64, "num_attention_heads": 2, "ffn_hidden_size": 64}
GRAPH = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}})
NUM_LAYERS = 8


def plan_of(*, stage_layers: tuple[int, ...], num_replicas: int = 1, num_encoders: int | None = None) -> Plan:
    """LLM replicas of one rank a stage, and an encoder on every rank, numbered replica after replica of the LLM."""
    ends = np.cumsum(stage_layers).tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    llm = [
        Replica(tuple(Stage((first * len(ranges) + index,), (each,)) for index, each in enumerate(ranges)))
        for first in range(num_replicas)
    ]
    count = num_replicas * len(ranges) if num_encoders is None else num_encoders
    encoders = tuple(Replica((Stage((rank,), ((0, NUM_LAYERS),)),)) for rank in range(count))
    return Plan({"vision": UnitPlan(encoders), "llm": UnitPlan(tuple(llm))})


def draw(build_sample, num_samples, *, seed, tokens=(64, 256, 1024)):
    random = Random(seed)
    return [build_sample(index, 32, ("vision", random.choice(tokens))) for index in range(num_samples)]


def costs_of(plan: Plan, lengths, *, balance: str = "none") -> ModelCosts:
    assignment = BALANCERS[balance](lengths, graph=GRAPH, plan=plan, options=BalanceOptions())
    return ModelCosts(assignment.shape(GRAPH, plan), assignment, lengths, CLUSTER, 128, RunOptions())


def busiest(costs: ModelCosts) -> float:
    of_units = (
        lane_seconds(costs.shape.plan, unit, costs.computations.of_both(unit)[0], placed.replica_of_microbatch)
        for unit, placed in costs.assignment.placed.items()
    )
    return float(sum(of_units).max())


def dealt(costs: ModelCosts, *, largest_first: bool) -> ModelCosts:
    found = deal_by_idle_time(costs, fills_waits=False, largest_first=largest_first)
    assert found is not None
    plan = costs.shape.plan
    validate_assignment(found, costs.lengths, graph=GRAPH, plan=plan)
    return costs.of_batch(found.shape(GRAPH, plan), found, costs.lengths)


@pytest.mark.parametrize("largest_first", [False, True])
def test_ranks_with_less_of_the_llm_encode_more(build_sample, largest_first):
    """Six layers against two: the second rank takes what evens both out, to a microbatch."""
    plan, lengths = plan_of(stage_layers=(6, 2)), [build_sample(index, 32, ("vision", 256)) for index in range(12)]
    before = costs_of(plan, lengths)
    after = dealt(before, largest_first=largest_first)
    placed, seconds = after.assignment.placed, {unit: after.computations.of_both(unit)[0] for unit in ("vision", "llm")}
    loads = sum(lane_seconds(plan, unit, seconds[unit], placed[unit].replica_of_microbatch) for unit in seconds)
    assert placed["vision"].counts[0] < placed["vision"].counts[1]
    assert abs(loads[0] - loads[1]) <= seconds["vision"].sum() / 12
    assert busiest(after) < busiest(before)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_near_the_best_partition(build_sample, seed):
    plan, lengths = plan_of(stage_layers=(3, 3, 2)), draw(build_sample, 7, seed=seed)
    costs = costs_of(plan, lengths)
    vision, llm = (costs.computations.of_both(unit)[0] for unit in ("vision", "llm"))
    others = lane_seconds(plan, "llm", llm, np.zeros(7, np.int64))
    best = min(float((others + np.bincount(owners, vision[0], 3)).max()) for owners in product(range(3), repeat=7))
    assert best * (1 - 1e-9) <= busiest(dealt(costs, largest_first=True)) <= 4 / 3 * best
    assert best * (1 - 1e-9) <= busiest(dealt(costs, largest_first=False)) <= best + vision.max()


@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("balance", ["none", "orchmllm", "entrain"])
def test_microbatches_stay_whole_and_on_the_ranks_of_their_llm_replica(build_sample, balance, largest_first):
    plan, lengths = plan_of(stage_layers=(6, 2), num_replicas=3), draw(build_sample, 24, seed=2)
    before = costs_of(plan, lengths, balance=balance)
    after = dealt(before, largest_first=largest_first)
    by_llm_replica = [
        [sorted(batch for replica in units["vision"][2 * each : 2 * each + 2] for batch in replica) for each in range(3)]
        for units in (before.assignment.units, after.assignment.units)
    ]
    assert by_llm_replica[0] == by_llm_replica[1]
    assert before.assignment.units["llm"] == after.assignment.units["llm"]
    assert after.assignment != before.assignment
    if balance == "none":  # one microbatch of the encoder for each of the LLM
        of_llm = {
            atom.sample_id: index
            for replica in after.assignment.units["llm"]
            for index, batch in enumerate(replica)
            for atom in batch
        }
        for replica in after.assignment.units["vision"]:
            needed_at = [of_llm[batch[0].sample_id] for batch in replica]
            assert needed_at == sorted(needed_at)


def test_encoders_without_a_choice_stay_where_they_are(build_sample):
    lengths = draw(build_sample, 8, seed=0)
    apart = plan_of(stage_layers=(4, 4), num_encoders=0)
    elsewhere = Plan(
        {"vision": UnitPlan(tuple(Replica((Stage((rank,), ((0, 8),)),)) for rank in (2, 3))), "llm": apart.units["llm"]}
    )
    across = Plan(
        {
            "vision": UnitPlan((Replica((Stage((0,), ((0, 4),)), Stage((1,), ((4, 8),)))),)),
            "llm": UnitPlan(tuple(Replica((Stage((rank,), ((0, 8),)),)) for rank in (0, 1))),
        }
    )
    one_each = plan_of(stage_layers=(8,), num_replicas=2)
    uneven = plan_of(stage_layers=(4, 4), num_replicas=2, num_encoders=3)
    long, short = Replica((Stage((0,), ((0, 4),)), Stage((1,), ((4, 8),)))), Replica((Stage((2,), ((0, 8),)),))
    unlike = Plan({"vision": UnitPlan((long, short)), "llm": plan_of(stage_layers=(3, 3, 2)).units["llm"]})
    for plan in (elsewhere, across, one_each, uneven, unlike):
        assert deal_by_idle_time(costs_of(plan, lengths), fills_waits=False, largest_first=False) is None


@pytest.mark.parametrize("seed", range(2))
def test_auto_takes_it_where_the_step_is_predicted_to_be_shorter(build_sample, seed):
    plan, lengths = plan_of(stage_layers=(3, 3, 2)), draw(build_sample, 12, seed=seed, tokens=(256, 512, 1024, 2048))
    predictor = StepPredictor(ScheduleCache(GRAPH, plan, BUILDERS["optimus"]), CLUSTER, 128)
    options = BalanceOptions(predictor=predictor, vocab_size=128)
    given = {"graph": GRAPH, "plan": plan, "options": options}
    found = BALANCERS["auto"](lengths, **given)
    as_they_are = [predictor.predict(BALANCERS[name](lengths, **given), lengths) for name in BALANCERS if name != "auto"]
    assert predictor.predict(found, lengths).seconds < min(each.seconds for each in as_they_are)
    assert found == BALANCERS["auto"](lengths, **given)
