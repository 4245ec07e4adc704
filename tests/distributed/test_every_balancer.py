"""Every balancer, with every rank loading what it was assigned or samples exchanged: loss and gradients of one process."""

from dataclasses import replace
from typing import Any

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.length_cost import LengthCost
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.validate import validate_assignment
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_every_builder import MODELS, build_case

CLUSTER = Cluster(4, 0.1, 8.0, NodeLink(1.0, 60.0), Network(1.0, 100.0, 1))
SCARCE = replace(CLUSTER, memory_gb=1e-5)
"""Memory for some microbatches of these models, not for all."""
GRANULARITIES = {"orchmllm": (Granularity.ITEM, Granularity.SAMPLE)}


def balanced_case(name: str, model: str, *, builder: str = "1f1b", **given: Any) -> GradientCase:
    """The LLM has 2 replicas, a generator 3, encoders 1 or 2: each unit places the samples otherwise."""
    case = build_case(builder, MODELS[model])
    graph, plan = case.graph, case.plan
    lengths = [case.source.lengths(index) for index in range(len(case.source))]
    predictor = StepPredictor(ScheduleCache(graph, plan, BUILDERS[builder]), CLUSTER, case.source.vocab_size)
    options = BalanceOptions(ranks_per_node=4, predictor=predictor, vocab_size=case.source.vocab_size, **given)
    assignment = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
    validate_assignment(assignment, lengths, graph=graph, plan=plan)
    return replace(case, assignment=assignment)


def repeats(name: str, model: str, exchanges_samples: bool) -> bool:
    """Tell whether other rows have the balancer, or what it meets."""
    is_drawn = model == "encoder, LLM and generator"
    return exchanges_samples != is_drawn or not (is_drawn or name in ("orchmllm", "disttrain", "entrain"))


@pytest.mark.deep(when=repeats)
@pytest.mark.parametrize("exchanges_samples", [False, True])
@pytest.mark.parametrize("model", ["two encoders and LLM", "encoder, LLM and generator"])
@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_trains_every_model(ranks: RankPool, name: str, model: str, exchanges_samples: bool) -> None:
    for granularity in GRANULARITIES.get(name, (Granularity.ITEM,)):
        case = balanced_case(name, model, granularity=granularity)
        assert_matches(replace(case, exchanges_samples=exchanges_samples), ranks)


@pytest.mark.parametrize("count", [MicrobatchCount.EFFECTIVE, MicrobatchCount.PREDICTED])
@pytest.mark.parametrize("builder", ["eager-1f1b-memory", "zb-memory", "zb-h1", "zb-v"])
def test_deferral_under_schedules_that_run_ahead(ranks: RankPool, builder: str, count: MicrobatchCount) -> None:
    """Entrain's own rows: merged encoders, its number of microbatches, backwards cut by sample, forwards within memory."""
    case = balanced_case("entrain", "two encoders and LLM", builder=builder, microbatch_count=count, merges_encoders=True)
    cluster = SCARCE if BUILDERS[builder].needs_costs else None
    assert_matches(replace(case, passes=(split_backward,), cluster=cluster), ranks)


@pytest.mark.parametrize("builder", ["interleaved-1f1b", "zb-v"])
def test_microbatches_in_the_order_chosen_for_virtual_stages(ranks: RankPool, builder: str) -> None:
    assert_matches(balanced_case("disttrain", "encoder, LLM and generator", builder=builder), ranks)


@pytest.mark.parametrize("exchanges_samples", [False, True])
def test_batches_rearranged_over_nodes(ranks: RankPool, exchanges_samples: bool) -> None:
    """Two nodes of two ranks that all units share: the encoders' batches change places, and nothing else."""
    case = build_case("1f1b", MODELS["two encoders and LLM"])
    sizes = {name: UnitSizes(tensor_parallel_size=2 if name == "llm" else 1) for name in case.graph.unit_names}
    case = replace(case, plan=plan_colocated(case.graph, sizes=sizes, world_size=4), exchanges_samples=exchanges_samples)
    lengths = [case.source.lengths(index) for index in range(len(case.source))]
    options = BalanceOptions(ranks_per_node=2, vocab_size=case.source.vocab_size)
    balanced = BALANCERS["orchmllm"](lengths, graph=case.graph, plan=case.plan, options=options)
    arrangement = NodeArrangement(2, bytes_per_element=8, num_decoding_ranks=4 * exchanges_samples)
    work = BatchWork(case.graph, lengths, options)
    arranged, sent = arrangement.arrange(balanced, work, plan=case.plan, sample_ids=range(len(lengths)))
    assert sent.after < sent.before and arranged != balanced
    assert_matches(replace(case, assignment=arranged), ranks)


@pytest.mark.parametrize("name", [name for name, row in BALANCERS.items() if row.weighs_units])
def test_units_of_declared_costs(ranks: RankPool, name: str) -> None:
    """The encoders as if they padded (Alg. 4 and 5), the LLM with attention's square (Alg. 2's other form)."""
    costs = {"vision": "padded", "audio": "padded-attention:0.1", "llm": "linear+quadratic:0.01"}
    declared = {unit: LengthCost.from_text(text) for unit, text in costs.items()}
    assert_matches(balanced_case(name, "two encoders and LLM", unit_costs=declared), ranks)
