"""Encoder replicas that a plan gives unequal shares of the LLM's microbatches."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.placement import deal, turns_of
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_assignment


@pytest.mark.parametrize(
    ("shares", "turns"),
    [((1, 1, 1), [0, 1, 2]), ((3, 1), [0, 0, 0, 1]), ((1, 3), [1, 1, 0, 1]), ((2, 0, 4), [2, 0, 2, 2, 0, 2]), ((5,), [0] * 5)],
)
def test_turns_are_spread_evenly(shares, turns):
    assert turns_of(shares).tolist() == turns


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
    items = [sum(map(len, replica)) for replica in assignment.units["vision"]]
    assert items == [12, 12, 4, 4]
    assert BALANCERS[balance](lengths, graph=graph, plan=even, options=options).units["llm"] == assignment.units["llm"]
