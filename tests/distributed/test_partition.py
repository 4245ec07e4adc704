"""Encoder pipelines that take unequal parts of an LLM replica's microbatches: loss and gradients of one process."""

from dataclasses import replace

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_every_builder import UNITS
from tests.distributed.test_optimus import EVEN


@pytest.mark.parametrize("builder", ["optimus", "optimus-zb", "nested"])
def test_a_plan_with_unequal_shares_trains_as_one_process_does(ranks: RankPool, builder: str) -> None:
    """Four ranks: the LLM has tp 2 and pp 2; of four replicas of the encoder, those of the first stage take one of three."""
    graph = ModelGraph.from_dict({"units": {name: UNITS[name] for name in ("vision", "llm")}})
    vision = UnitPlan(tuple(Replica((Stage((rank,), ((0, 4),)),)) for rank in range(4)), microbatch_shares=(1, 1, 2, 2))
    llm = UnitPlan((Replica((Stage((0, 1), ((0, 2),)), Stage((2, 3), ((2, 4),)))),), 2)
    shapes = tuple(SampleShape((("vision", 1, size),), 2 + size, 2) for size in (1, 2, 3, 1, 2, 1))
    source = RandomSource(graph, shapes, 12)
    plan = Plan({"vision": vision, "llm": llm})
    lengths = [replace(source.lengths(index), sample_id=index) for index in range(len(shapes))]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions())
    assert list(map(len, assignment.units["vision"])) == [1, 1, 2, 2]
    assert_matches(GradientCase(graph, plan, assignment, source, builder=builder, cluster=EVEN), ranks)
