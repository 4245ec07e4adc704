from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.length_cost import LengthCost
from multimodal.values.assignment import Atom

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
