from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.entrain import balance_entrain
from multimodal.balance.unit_cost import UnitCost


def test_encoders_stay_beside_the_llm_where_replicas_have_unequally_many_microbatches(graph, build_plan, build_sample):
    tokens = [900, 100, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    lengths = [build_sample(index, each, ("vision", 4 * each)) for index, each in enumerate(tokens)]
    plan = build_plan(vision=3, audio=1, llm=3)
    options = BalanceOptions(num_microbatches=4, unit_costs=dict.fromkeys(graph.unit_names, UnitCost()))
    assigned = balance_entrain(lengths, graph=graph, plan=plan, options=options)
    assert len({len(replica) for replica in assigned.units["llm"]}) > 1
    for encoded, run in zip(assigned.units["vision"], assigned.units["llm"], strict=True):
        assert {atom.sample_id for microbatch in encoded for atom in microbatch} == {
            atom.sample_id for microbatch in run for atom in microbatch
        }
