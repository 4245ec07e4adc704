import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.values.errors import AssignmentError
from multimodal.values.validate import validate_assignment

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, "micro batch size 0 must be at least 1; set --micro-batch-size"),
        ({"encoder_micro_batch_sizes": {"llm": 1}}, r"'llm', which is no encoder of the model \(encoders: vision, audio\)"),
        ({"encoder_micro_batch_sizes": {"vision": 0}}, "unit 'vision': micro batch size 0 must be at least 1"),
        ({"unit_costs": {"lidar": LengthCost()}}, "a cost is given for 'lidar', which is no unit of the model"),
        ({"ranks_per_node": 0}, "0 ranks per node"),
    ],
)
def test_wrong_requests_are_named(balance, graph, build_plan, build_sample, change, message):
    plan = build_plan(vision=1, audio=1, llm=1)
    with pytest.raises(AssignmentError, match=message):
        balance([build_sample(0, 5)], graph=graph, plan=plan, options=BalanceOptions(**change))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "the global batch has no samples"),
        ([(4, 5), (4, 5)], "sample 4 is in the global batch twice"),
        ([(4, 5, ("lidar", 3))], "item 0 of sample 4 is for unit 'lidar', which is no encoder of the model"),
        ([(4, -1)], "sample 4 has a length of -1 tokens; lengths are integers from 0 to 2147483647"),
        ([(4, 2**40)], "sample 4 has a length of 1099511627776 tokens"),
        ([(4, float("nan"))], "sample 4 has a length of nan tokens"),
    ],
)
def test_wrong_samples_are_named(balance, graph, build_plan, build_sample, samples, message):
    lengths = [build_sample(*sample) for sample in samples]
    plan = build_plan(vision=1, audio=1, llm=1)
    with pytest.raises(AssignmentError, match=message):
        balance(lengths, graph=graph, plan=plan, options=BalanceOptions())
