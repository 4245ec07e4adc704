"""Microbatches within a number of tokens, by every balancer."""

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, MicrobatchCount
from multimodal.values.errors import AssignmentError

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


def test_in_order_a_microbatch_takes_samples_while_it_has_room(graph, build_plan, build_sample):
    lengths = [build_sample(index, each) for index, each in enumerate(TOKENS)]
    options = BalanceOptions(tokens_per_microbatch=320)
    assigned = BALANCERS["none"](lengths, graph=graph, plan=build_plan(vision=1, audio=1, llm=1), options=options)
    found = [[TOKENS[atom.sample_id] for atom in microbatch] for microbatch in assigned.units["llm"][0]]
    assert found == [[10, 300], [20, 50, 200, 40], [60, 30, 80, 10, 120], [90]]


def test_no_tokens_are_no_budget(graph, build_plan, build_sample):
    with pytest.raises(AssignmentError, match="0 tokens per microbatch; there must be at least 1"):
        options = BalanceOptions(tokens_per_microbatch=0)
        BALANCERS["none"](batch_of(build_sample), graph=graph, plan=build_plan(vision=1, audio=1, llm=1), options=options)
