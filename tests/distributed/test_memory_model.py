"""Predicted peaks of activations against what the runtime counts in real steps on several ranks."""

from dataclasses import replace

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from tests.distributed.dealt_case import unit_plan
from tests.distributed.gradient_case import GradientCase, build_session, plan_case
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", **SHAPE, "image": {"patch_size": 2, "in_channels": 1}},
            "llm": {"role": "backbone", **SHAPE},
        }
    }
)
FROZEN = ModelGraph(tuple(replace(unit, freeze_module=True) for unit in GRAPH.units), GRAPH.edges)
DEEPSTACK = ModelGraph(
    tuple(
        replace(unit, image=replace(unit.image, deepstack_layers=(0, 1, 3)) if unit.image is not None else None)
        for unit in GRAPH.units
    ),
    GRAPH.edges,
)
VISION = unit_plan(0, num_layers=6)
PLAN = Plan({"vision": VISION, "llm": unit_plan(1, pp=2, num_layers=6)})
TENSOR_PLAN = Plan({"vision": VISION, "llm": unit_plan(1, tp=2, num_layers=6)})
SAMPLES = tuple(SampleShape((("vision", 4 + index % 3, 6),), 60 + 10 * index, 20 + 5 * index) for index in range(6))
VOCABULARY = 64
LINK = {"bandwidth_gbytes_per_second": 10.0, "latency_us": 10.0}
CLUSTER = Cluster.from_dict(
    {
        "gpus_per_node": 4,
        "peak_tflops": 0.1,
        "memory_gb": 1,
        "dtype": "float64",
        "intra_node": LINK,
        "inter_node": {**LINK, "nics_per_node": 1},
    }
)


def measured_bytes(case: GradientCase) -> int:
    """Runs on a rank."""
    return build_session(case).executor.execute(plan_case(case)).peak_activation_bytes


def predicted_bytes(case: GradientCase) -> list[int]:
    lengths = [case.source.lengths(index) for index in range(len(case.source))]
    shape = case.assignment.shape(case.graph, case.plan)
    schedule = build_schedule(BUILDERS[case.builder], shape)
    options = RunOptions(case.recompute, sequence_parallel=case.sequence_parallel, transformer_impl="local")
    costs = ModelCosts(shape, case.assignment, lengths, CLUSTER, VOCABULARY, options)
    found = simulate_schedule(schedule, costs)
    ranks = range(case.plan.num_ranks)
    return [found.peak_activation_bytes[case.plan.lane_of_rank[rank]] + costs.memory.broker_bytes(rank) for rank in ranks]


@pytest.mark.parametrize(
    ("graph", "builder", "recompute"),
    [
        *((GRAPH, "1f1b", recompute) for recompute in (None, "selective", "full")),
        (GRAPH, "gpipe", None),
        (FROZEN, "1f1b", None),
        (FROZEN, "gpipe", "full"),
    ],
    ids=lambda value: ("frozen" if value is FROZEN else "trained") if isinstance(value, ModelGraph) else str(value),
)
def test_peaks_are_predicted(ranks: RankPool, graph: ModelGraph, builder: str, recompute: str | None) -> None:
    check(ranks, case_of(graph, PLAN, builder=builder, recompute=recompute))


def test_peaks_with_more_between_stages_are_predicted(ranks: RankPool) -> None:
    check(ranks, case_of(DEEPSTACK, PLAN))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_peaks_of_tensor_parallel_ranks_are_predicted(ranks: RankPool, sequence_parallel: bool) -> None:
    check(ranks, case_of(GRAPH, TENSOR_PLAN, sequence_parallel=sequence_parallel))


def case_of(graph: ModelGraph, plan: Plan, **options) -> GradientCase:
    source = RandomSource(graph, SAMPLES, VOCABULARY)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions(vocab_size=VOCABULARY))
    return GradientCase(graph, plan, assignment, source, **options)


def check(ranks: RankPool, case: GradientCase) -> None:
    measured = ranks.run(measured_bytes, case, world_size=case.plan.num_ranks)
    assert predicted_bytes(case) == pytest.approx(measured, rel=0.1)
