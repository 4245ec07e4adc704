from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.length_cost import LengthCost
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.validate import validate_assignment
from tests.unit.plan.planners.planning_cases import TWO, random_lengths

TOKENS = {name: LengthCost() for name in ("vision", "audio", "llm")}


def test_tokens_are_balanced_over_replicas_and_microbatches(graph, build_plan, build_sample):
    texts = [10, 60, 20, 30, 20, 20]
    assignment = BALANCERS["orchmllm"](
        [build_sample(index, tokens) for index, tokens in enumerate(texts)],
        graph=graph,
        plan=build_plan(vision=1, audio=1, llm=2),
        options=BalanceOptions(micro_batch_size=2, unit_costs=TOKENS),
    )
    # 60 + 20 against 30 + 20 + 20 + 10, and both in two microbatches: the latter as 30 + 10 against 20 + 20.
    assert assignment.units["llm"] == (((Atom(1),), (Atom(5),)), ((Atom(0), Atom(3)), (Atom(2), Atom(4))))


def test_items_leave_their_sample_and_come_in_the_order_of_need(graph, build_plan, build_sample):
    lengths = [
        build_sample(0, 4, ("vision", 8), ("vision", 8), ("vision", 16)),
        build_sample(1, 90, ("vision", 24)),
        build_sample(2, 50, ("vision", 4)),
    ]
    assignment = BALANCERS["orchmllm"](
        lengths,
        graph=graph,
        plan=build_plan(vision=2, audio=1, llm=1),
        options=BalanceOptions(micro_batch_size=1, unit_costs=TOKENS, encoder_micro_batch_sizes={"vision": 1}),
    )
    assert assignment.units["llm"] == (((Atom(1),), (Atom(2),), (Atom(0),)),)
    # 24 + 8 against 16 + 8 + 4; sample 1 is needed first, sample 0 last.
    assert assignment.units["vision"] == (
        ((Atom(1, 0),), (Atom(0, 1),)),
        ((Atom(2, 0),), (Atom(0, 0),), (Atom(0, 2),)),
    )


def test_by_default_encoders_have_as_many_microbatches_as_the_llm(graph, build_plan, build_sample):
    assignment = BALANCERS["orchmllm"](
        [build_sample(index, 10, ("vision", 8), ("vision", 8)) for index in range(8)],
        graph=graph,
        plan=build_plan(vision=2, audio=1, llm=1),
        options=BalanceOptions(micro_batch_size=2, unit_costs=TOKENS),
    )
    assert [len(replica) for replica in assignment.units["llm"]] == [4]
    assert [[len(microbatch) for microbatch in replica] for replica in assignment.units["vision"]] == [[4, 4], [4, 4]]


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
