"""What holds for every balancer: everything is placed once, within sizes and shares; cached schedules are those built afresh."""

from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.placement import deal, share_microbatches
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import LengthBatch, SampleLengths
from multimodal.values.validate import validate_assignment
from tests.unit.balance.test_placement import SAMPLES, place_samples
from tests.unit.golden_answers import Kinds, answer, golden_test
from tests.unit.plan.planners.planning_cases import TWO, random_lengths

ITEMS = st.lists(st.tuples(st.sampled_from(["vision", "audio"]), st.integers(1, 40)), max_size=3)
BATCHES = st.lists(st.tuples(st.integers(0, 50), ITEMS), min_size=1, max_size=12)
COSTS = st.dictionaries(
    st.sampled_from(["vision", "audio", "llm"]), st.builds(LengthCost, st.sampled_from(CostForm), st.just(0.01)), max_size=3
)
SIZES = st.fixed_dictionaries({}, optional={"vision": st.integers(1, 5), "audio": st.integers(1, 5)})


@pytest.fixture(params=BALANCERS, scope="module")
def balance(request):
    return BALANCERS[request.param]


@given(data=st.data(), micro_batch_size=st.integers(1, 4), sizes=SIZES)
def test_everything_is_placed_once_within_the_sizes(balance, graph, build_plan, build_sample, data, micro_batch_size, sizes):
    batch = data.draw(BATCHES)
    ids = data.draw(st.permutations(range(len(batch))))
    lengths = [build_sample(ids[index], text, *items) for index, (text, items) in enumerate(batch)]
    plan = build_plan(**data.draw(st.fixed_dictionaries({name: st.integers(1, 4) for name in ("vision", "audio", "llm")})))
    options = BalanceOptions(
        micro_batch_size=micro_batch_size,
        encoder_micro_batch_sizes=sizes,
        granularity=data.draw(st.sampled_from(Granularity)),
        unit_costs=data.draw(COSTS),
    )
    assignment = balance(lengths, graph=graph, plan=plan, options=options)
    validate_assignment(assignment, lengths, graph=graph, plan=plan)
    is_reordered = balance not in (BALANCERS["none"], BALANCERS["auto"])  # these depend on the order of the data
    again = lengths[::-1] if is_reordered else lengths
    assert assignment == balance(again, graph=graph, plan=plan, options=options)
    for unit, limit in sizes.items():
        assert all(len(microbatch) <= limit for replica in assignment.units[unit] for microbatch in replica)
    most_microbatches = -(-len(lengths) // (micro_batch_size * plan.units["llm"].data_parallel_size))
    assert all(len(replica) <= most_microbatches for replica in assignment.units["llm"])


@pytest.mark.parametrize("name", sorted({*BALANCERS} - {"entrain", "auto"}))  # which encode some samples earlier
@given(batch=BATCHES, replicas=st.tuples(*[st.integers(1, 3)] * 3), sizes=SIZES)
def test_an_encoder_replica_works_in_the_order_of_need(name, graph, build_plan, build_sample, batch, replicas, sizes):
    lengths = [build_sample(index, text, *items) for index, (text, items) in enumerate(batch)]
    plan = build_plan(**dict(zip(("vision", "audio", "llm"), replicas, strict=True)))
    options = BalanceOptions(micro_batch_size=2, encoder_micro_batch_sizes=sizes)
    assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
    round_of_sample = {
        atom.sample_id: number
        for replica in assignment.units["llm"]
        for number, microbatch in enumerate(replica)
        for atom in microbatch
    }
    for unit in ("vision", "audio"):
        for replica in assignment.units[unit]:
            rounds = [round_of_sample[atom.sample_id] for microbatch in replica for atom in microbatch]
            assert rounds == sorted(rounds)


def say_together(document):
    """Return what every balancer says alike."""
    (said,) = {answer(place_samples, {**document, "balancer": name}) for name in BALANCERS}
    return said


BATCHES_AND_OPTIONS: Kinds = {"batch": ({**SAMPLES, "options": {}}, say_together)}
test_wrong_requests_and_samples_are_named = golden_test("balancers.txt", BATCHES_AND_OPTIONS)
TOKENS = [10, 300, 20, 50, 200, 40, 60, 30, 80, 10, 120, 90]


def batch_of(build_sample):
    return [build_sample(index, each, ("vision", 4 * (index % 3) + 4)) for index, each in enumerate(TOKENS)]


@pytest.mark.parametrize("count", [MicrobatchCount.GIVEN, MicrobatchCount.PREDICTED])
@pytest.mark.parametrize("most", [1, 100, 150, 400, 5000])
@pytest.mark.parametrize("name", BALANCERS)
def test_no_microbatch_of_several_samples_has_more(graph, build_plan, build_sample, name, most, count):
    lengths = batch_of(build_sample)
    tokens = {
        sample.sample_id: sample.num_text_tokens + sum(item.num_output_tokens for item in sample.items) for sample in lengths
    }
    options = BalanceOptions(tokens_per_microbatch=most, microbatch_count=count)
    assigned = BALANCERS[name](lengths, graph=graph, plan=build_plan(vision=1, audio=1, llm=2), options=options)
    microbatches = [microbatch for replica in assigned.units["llm"] for microbatch in replica]
    assert sorted(atom.sample_id for microbatch in microbatches for atom in microbatch) == list(range(len(TOKENS)))
    for microbatch in microbatches:
        assert len(microbatch) == 1 or sum(tokens[atom.sample_id] for atom in microbatch) <= most
    assert most < 5000 or len(microbatches) <= 2


def test_each_replica_of_the_llm_deals_its_microbatches_among_its_own_pipelines():
    """Two replicas of the LLM with eight microbatches each; of the encoder's four, numbers 0 and 2 belong to the first."""
    dealt = deal(np.arange(17), np.arange(16), num_replicas=4, shares=(3, 1))
    assert np.diff(dealt.microbatch_starts).tolist() == [6, 6, 2, 2]
    rows = np.split(dealt.atoms, dealt.microbatch_starts[1:-1])
    assert [row.tolist() for row in rows] == [[0, 2, 4, 8, 10, 12], [1, 3, 5, 9, 11, 13], [6, 14], [7, 15]]


@pytest.mark.parametrize("balance", [name for name, row in BALANCERS.items() if not row.needs_costs])
def test_every_balancer_keeps_to_the_shares(graph, build_plan, build_sample, balance):
    even = build_plan(vision=4, audio=1, llm=2)
    plan = Plan({**even.units, "vision": replace(even.units["vision"], microbatch_shares=(3, 1))})
    lengths = [build_sample(index, 10, ("vision", 8), ("audio", 4)) for index in range(32)]
    options = BalanceOptions(micro_batch_size=2)
    assignment = BALANCERS[balance](lengths, graph=graph, plan=plan, options=options)
    validate_assignment(assignment, lengths, graph=graph, plan=plan)
    assert [sum(map(len, replica)) for replica in assignment.units["vision"]] == [12, 12, 4, 4]
    assert BALANCERS[balance](lengths, graph=graph, plan=even, options=options).units["llm"] == assignment.units["llm"]


UNIT_SIZES = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=2)}
PLANS = {
    "own ranks": plan_disaggregated(TWO, sizes=UNIT_SIZES, world_size=6),
    "shared ranks": plan_colocated(TWO, sizes={"llm": UnitSizes(pipeline_parallel_size=2)}, world_size=4),
}
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "dip", "dip-2", "breadth-first", "interleaved-1f1b")


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("balancer", BALANCERS)
def test_a_schedule_from_the_cache_is_the_one_built_afresh(balancer: str, data: st.DataObject) -> None:
    plan = PLANS[data.draw(st.sampled_from(sorted(PLANS)))]
    builder = BUILDERS[data.draw(st.sampled_from(SCHEDULES))]
    passes = [PASSES[name] for name in data.draw(st.sampled_from([(), ("split-backward",), ("reduce-by-layer",)]))]
    cache = ScheduleCache(TWO, plan, builder, passes)
    options = BalanceOptions(micro_batch_size=data.draw(st.integers(1, 2)), vocab_size=512)
    for seed in data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=3)):
        lengths = random_lengths(TWO, count=12, seed=seed)
        assignment = BALANCERS[balancer](lengths, graph=TWO, plan=plan, options=options)
        afresh = build_schedule(builder, Assignment(dict(assignment.units)).shape(TWO, plan), passes=passes)
        for _ in range(2):
            found = cache.schedule(assignment)
            assert found == afresh
            validate_schedule(found)


WHOLE = [name for name, row in BALANCERS.items() if row.keeps_samples_whole and not row.needs_costs]


def build_plan(graph: ModelGraph, num_replicas: int, shares: tuple[int, ...] = ()) -> Plan:
    """Every unit on a rank for each of its replicas."""

    def replicas(unit: str) -> tuple[Replica, ...]:
        return tuple(Replica((Stage((rank,), ((0, len(graph.unit(unit).layers)),)),)) for rank in range(num_replicas))

    llm = graph.backbone.name
    return Plan({name: UnitPlan(replicas(name), microbatch_shares=shares if name == llm else ()) for name in graph.unit_names})


@pytest.mark.parametrize("name", [next(name for name in WHOLE if name != "none"), "auto"])
def test_work_goes_with_the_shares(name: str):
    lengths = random_lengths(TWO, count=400)
    options = BalanceOptions(num_microbatches=20)
    found = BALANCERS[name](lengths, graph=TWO, plan=build_plan(TWO, 3, (30, 20, 10)), options=options)
    assert [len(own) for own in found.units["llm"]] == [30, 20, 10]
    work = BatchWork(TWO, LengthBatch.of(lengths), options)
    flops = dict(zip(work.arrays.sample_ids.tolist(), work.whole_sample_flops().tolist(), strict=True))
    loads = [sum(flops[atom.sample_id] for each in own for atom in each) for own in found.units["llm"]]
    for load, share in zip(loads, (30, 20, 10), strict=True):
        assert load / sum(loads) == pytest.approx(share / 60, rel=0.01)


def test_replicas_that_differ_share_by_their_ranks():
    """An LLM of one rank, and of three in two stages; encoders on two others of their own take what comes, one after another."""
    num_layers = len(TWO.unit("llm").layers)
    deep = Replica((Stage((1, 2), ((0, 2),), 2), Stage((3, 4), ((2, num_layers),), 2)))
    llm = UnitPlan((Replica((Stage((0,), ((0, num_layers),)),)), deep))
    vision = UnitPlan(tuple(Replica((Stage((rank,), ((0, len(TWO.unit("vision").layers)),)),)) for rank in (5, 6, 7)))
    lengths = random_lengths(TWO, count=20)
    found = BALANCERS["none"](lengths, graph=TWO, plan=Plan({"vision": vision, "llm": llm}), options=BalanceOptions())
    assert [len(own) for own in found.units["llm"]] == [4, 16]
    counts = [len(own) for own in found.units["vision"]]
    assert max(counts) - min(counts) <= 1


def test_microbatches_of_one_number_are_alike_where_experts_are_shared():
    """What counts is the sum over rounds of the longest microbatch of any replica, since all wait for it."""
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    experts = {"num_experts": 4, "router_topk": 1, "ffn_hidden_size": 8}
    graph = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape, "experts": experts}}})
    sizes = np.rint(np.exp(np.random.default_rng(0).normal(7, 0.9, 62))).astype(int).tolist()
    lengths = [SampleLengths(index, (), size, size) for index, size in enumerate(sizes)]
    rounds = []
    for shared in (1, 4):
        plan = plan_colocated(graph, sizes={"llm": UnitSizes(expert_parallel_size=shared)}, world_size=4)
        found = BALANCERS["orchmllm"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=2))
        validate_assignment(found, lengths, graph=graph, plan=plan)
        loads = [[sum(sizes[atom.sample_id] for atom in microbatch) for microbatch in own] for own in found.units["llm"]]
        rounds.append(sum(max(column) for column in zip_longest(*loads, fillvalue=0)))
    assert rounds[1] < 0.97 * rounds[0]


@given(count=st.integers(0, 100), shares=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_microbatches_are_dealt_in_proportion(count: int, shares: list[int]):
    counts = share_microbatches(count, shares)
    assert sum(counts) == count and min(counts) >= (count >= len(shares))
    quotas = [count * share / sum(shares) for share in shares]
    if min(quotas) >= 1:
        assert all(abs(found - quota) < 1 for found, quota in zip(counts, quotas, strict=True))


def test_what_cannot_be_placed_is_refused():
    other = next(row for row in BALANCERS.values() if not (row.keeps_samples_whole or row.deals_shares))
    with pytest.raises(AssignmentError, match="keeps samples whole"):
        other(random_lengths(TWO, count=4), graph=TWO, plan=build_plan(TWO, 2, (1, 2)), options=BalanceOptions())
