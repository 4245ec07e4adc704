from types import SimpleNamespace

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, MicrobatchCount
from multimodal.balance.length_cost import LengthCost


def test_encoders_stay_beside_the_llm_where_replicas_have_unequally_many_microbatches(graph, build_plan, build_sample):
    tokens = [900, 100, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    lengths = [build_sample(index, each, ("vision", 4 * each)) for index, each in enumerate(tokens)]
    plan = build_plan(vision=3, audio=1, llm=3)
    options = BalanceOptions(num_microbatches=4, unit_costs=dict.fromkeys(graph.unit_names, LengthCost()))
    assigned = BALANCERS["entrain"](lengths, graph=graph, plan=plan, options=options)
    assert len({len(replica) for replica in assigned.units["llm"]}) > 1
    for encoded, run in zip(assigned.units["vision"], assigned.units["llm"], strict=True):
        assert {atom.sample_id for microbatch in encoded for atom in microbatch} == {
            atom.sample_id for microbatch in run for atom in microbatch
        }


SKEWED = [900, 40, 40, 40, 40, 40, 40, 40]
"""One sample holds most of the encoder's work: K_eff is 1."""


def count_microbatches(graph, build_plan, build_sample, **options):
    lengths = [build_sample(index, 50, ("vision", 4 * each)) for index, each in enumerate(SKEWED)]
    plan = build_plan(vision=1, audio=1, llm=1)
    given = BalanceOptions(num_microbatches=4, unit_costs=dict.fromkeys(graph.unit_names, LengthCost()), **options)
    return BALANCERS["entrain"](lengths, graph=graph, plan=plan, options=given)


class CountingPredictor:
    """Says that steps take longer the further their number of microbatches is from a favourite."""

    def __init__(self, favourite):
        self.favourite, self.seen = favourite, []

    def predict_each(self, assignments, lengths):
        counts = [len(assignment.units["llm"][0]) for assignment in assignments]
        self.seen += counts
        return [SimpleNamespace(seconds=abs(count - self.favourite), least_seconds=0.0) for count in counts]


def test_the_number_of_microbatches_is_as_given_effective_or_predicted(graph, build_plan, build_sample):
    def found(**options):
        return len(count_microbatches(graph, build_plan, build_sample, **options).units["llm"][0])

    assert found() == 4
    assert found(microbatch_count=MicrobatchCount.EFFECTIVE) == 1
    assert found(microbatch_count=MicrobatchCount.PREDICTED) == 4
    for favourite in (1, 2, 4):
        predictor = CountingPredictor(favourite)
        assert found(microbatch_count=MicrobatchCount.PREDICTED, predictor=predictor) == favourite
        assert predictor.seen == [4, 2, 1]
    unasked = CountingPredictor(1)
    assert (found(predictor=unasked), unasked.seen) == (4, [])


def test_merged_encoders_are_balanced_by_the_sum_of_their_work(graph, build_plan, build_sample):
    """Three large pictures and three small sounds, in two microbatches: even for each encoder, or for both together."""
    tokens, kinds = [200, 600, 600, 200, 300, 600], ["audio", "vision", "vision", "audio", "audio", "vision"]
    lengths = [build_sample(index, 10, (kind, each)) for index, (kind, each) in enumerate(zip(kinds, tokens, strict=True))]
    plan = build_plan(vision=1, audio=1, llm=1)

    def sums(**options):
        assigned = BALANCERS["entrain"](lengths, graph=graph, plan=plan, options=BalanceOptions(num_microbatches=2, **options))
        found = [0, 0]
        for microbatches in (assigned.units["vision"][0], assigned.units["audio"][0]):
            for index, microbatch in enumerate(microbatches):
                found[index] += sum(tokens[atom.sample_id] for atom in microbatch)
        return sorted(found)

    assert sums() == [900, 1600]
    assert sums(merges_encoders=True) == [1200, 1300]
