from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.values.assignment import Atom


def _batch(build_sample):
    return [
        build_sample(7, 5, ("vision", 8)),
        build_sample(3, 5, ("audio", 4), ("vision", 8), ("vision", 4)),
        build_sample(5, 5),
        build_sample(1, 5),
        build_sample(2, 5, ("vision", 16)),
    ]


def test_microbatches_are_dealt_round_robin(graph, build_plan, build_sample):
    assignment = BALANCERS["none"](
        _batch(build_sample),
        graph=graph,
        plan=build_plan(vision=2, audio=1, llm=2),
        options=BalanceOptions(micro_batch_size=2, encoder_micro_batch_sizes={}),
    )
    assert assignment.units["llm"] == (((Atom(7), Atom(3)), (Atom(2),)), ((Atom(5), Atom(1)),))
    # The LLM's microbatch 1 has no images, so the second vision replica idles.
    assert assignment.units["vision"] == (((Atom(7, 0), Atom(3, 1), Atom(3, 2)), (Atom(2, 0),)), ())
    assert assignment.units["audio"] == (((Atom(3, 0),),),)


def test_an_encoder_may_have_its_own_microbatch_size(graph, build_plan, build_sample):
    assignment = BALANCERS["none"](
        _batch(build_sample),
        graph=graph,
        plan=build_plan(vision=2, audio=1, llm=3),
        options=BalanceOptions(micro_batch_size=1, encoder_micro_batch_sizes={"vision": 3}),
    )
    assert assignment.units["llm"] == (((Atom(7),), (Atom(1),)), ((Atom(3),), (Atom(2),)), ((Atom(5),),))
    assert assignment.units["vision"] == (((Atom(7, 0), Atom(3, 1), Atom(3, 2)),), ((Atom(2, 0),),))


def test_replicas_beyond_the_last_microbatch_stay_idle(graph, build_plan, build_sample):
    assignment = BALANCERS["none"](
        [build_sample(0, 5)],
        graph=graph,
        plan=build_plan(vision=1, audio=1, llm=3),
        options=BalanceOptions(micro_batch_size=4, encoder_micro_batch_sizes={}),
    )
    assert assignment.units == {"vision": ((),), "audio": ((),), "llm": (((Atom(0),),), (), ())}
