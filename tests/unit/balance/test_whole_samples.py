"""Samples balanced by what they ask of all units together."""

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.values.assignment import Assignment
from multimodal.values.checks.validate_assignment import validate_assignment
from tests.unit.plan.planners.planning_cases import TWO, random_lengths

OPTIONS = BalanceOptions(micro_batch_size=3, vocab_size=4096)
LENGTHS = random_lengths(TWO, count=48)
PLAN = Candidate({unit.name: even_layout(unit, 1, 4, 1) for unit in TWO.units}, groups=(TWO.unit_names,)).build_plan(TWO)


def replica_flops(assignment: Assignment) -> list[float]:
    work = BatchWork(TWO, LENGTHS, OPTIONS)
    flops = [0.0] * 4
    for unit, placed in assignment.placed.items():
        replicas = placed.replica_of_microbatch.tolist()
        for replica, of_microbatch in zip(replicas, work.microbatch_work(unit, placed).tolist(), strict=True):
            flops[replica] += of_microbatch
    return flops


def assigned(name: str) -> Assignment:
    return BALANCERS[name](LENGTHS, graph=TWO, plan=PLAN, options=OPTIONS)


def test_replicas_get_equal_work_of_all_units() -> None:
    found = assigned("whole-sample")
    validate_assignment(found, LENGTHS, graph=TWO, plan=PLAN)
    work = replica_flops(found)
    assert max(work) / min(work) < 1.02
    assert max(work) < max(replica_flops(assigned("llm-only"))) < max(replica_flops(assigned("none")))


def test_items_stay_with_their_samples() -> None:
    found = assigned("whole-sample")
    routes = [route for group in found.routes(TWO).from_source.values() for route in group]
    assert routes and all(route.source.replica == route.target.replica for route in routes)
