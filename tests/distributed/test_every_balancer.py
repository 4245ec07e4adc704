"""Every balancer, with every rank loading what it was assigned or samples exchanged: loss and gradients of one process."""

from dataclasses import replace

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.step_graph import StepGraph, validate_assignment
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_every_builder import MODELS, build_case

CLUSTER = Cluster(4, 0.1, 8.0, NodeLink(1.0, 60.0), Network(1.0, 100.0, 1))
GRANULARITIES = {"orchmllm": (Granularity.ITEM, Granularity.SAMPLE)}


def balanced_case(name: str, model: str, *, granularity: Granularity = Granularity.ITEM) -> GradientCase:
    """The LLM has 2 replicas, a generator 3, encoders 1 or 2: each unit places the samples otherwise."""
    case = build_case("1f1b", MODELS[model])
    graph, plan = case.graph, case.plan
    lengths = [case.source.lengths(index) for index in range(len(case.source))]
    predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS["1f1b"]), CLUSTER, case.source.vocab_size)
    options = BalanceOptions(granularity=granularity, ranks_per_node=4, predictor=predictor, vocab_size=case.source.vocab_size)
    assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
    validate_assignment(StepGraph(graph, plan, assignment), lengths)
    return replace(case, assignment=assignment)


@pytest.mark.parametrize("exchanges_samples", [False, True])
@pytest.mark.parametrize("model", ["two encoders and LLM", "encoder, LLM and generator"])
@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_trains_every_model(ranks: RankPool, name: str, model: str, exchanges_samples: bool) -> None:
    for granularity in GRANULARITIES.get(name, (Granularity.ITEM,)):
        case = balanced_case(name, model, granularity=granularity)
        assert_matches(replace(case, exchanges_samples=exchanges_samples), ranks)
