"""Every builder on every kind of model, units with unequal numbers of replicas: loss and gradients of one process."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.length_cost import LengthCost
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.plan.plans_of_sizes import UnitSizes, fold_stages, plan_colocated, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.schedule.passes import PASSES, passes_named
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import validate_assignment
from tests.distributed.dealt_case import dealt_case, described, source_of, unit_plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.small_run import LEFT_OUT, SIZED_OTHERWISE, train

MODELS = {
    "one unit": ("llm",),
    "encoder and LLM": ("vision", "llm"),
    "two encoders and LLM": ("vision", "audio", "llm"),
    "encoder, LLM and generator": ("vision", "llm", "painter"),
}
V_SHAPE = (((0, 1), (3, 4)), ((1, 2), (2, 3)))


def build_case(builder: str, names: tuple[str, ...]) -> GradientCase:
    """The LLM has 2 replicas of 2 V-shaped stages; a generator has 3 replicas; encoders have 1, two of them on one rank."""
    llm = UnitPlan(tuple(Replica((Stage((r,), V_SHAPE[0]), Stage((r + 1,), V_SHAPE[1]))) for r in (0, 2)))
    encoder = unit_plan(7 if "painter" in names else 4)
    units = {"llm": llm, "painter": unit_plan(4, dp=3), "vision": encoder, "audio": encoder}
    return dealt_case(described(*names), Plan({name: units[name] for name in names}), builder=builder)


@pytest.mark.deep(when=lambda name: name not in ("reduce-by-layer", "delay-forward"))  # the master test draws the others
@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_leaves_a_generator_what_it_is(ranks: RankPool, name: str) -> None:
    case = build_case("1f1b", MODELS["encoder, LLM and generator"])
    assert_matches(replace(case, passes=passes_named(name)), ranks)


PAIRS = [",".join(pair) for pair in itertools.permutations(PASSES, 2) if pair[1] not in PASSES[pair[0]].undone_by]


@pytest.mark.deep(when=lambda names: not names.startswith("split-backward,"))  # the master test draws others
@pytest.mark.parametrize("names", PAIRS)
def test_every_pair_of_passes_keeps_the_gradients(ranks: RankPool, names: str) -> None:
    """An encoder of two stages, whose first microbatch goes to two of the LLM's, and two replicas of an LLM of two stages."""
    plan = Plan({"vision": unit_plan(0, pp=2), "llm": unit_plan(2, dp=2, pp=2)})
    case = dealt_case(described("vision", "llm"), plan, builder="1f1b", passes=passes_named(names))
    placed = {"vision": [[[(0, 0), (1, 0)], [(2, 0)]]], "llm": [[[(0, -1)], [(2, -1)], [(4, -1)]], [[(3, -1)], [(1, -1)]]]}
    assert_matches(replace(case, assignment=Assignment(placed)), ranks)


def is_like_others(builder: str, model: str) -> bool:
    """Tell whether the row is an alias, or its model has less than others."""
    return bool(BUILDERS[builder].alias_of) or (
        (builder != "zb-v" or model == "one unit") and model != "encoder, LLM and generator"
    )


@pytest.mark.deep(when=is_like_others)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_every_builder_trains_every_model(ranks: RankPool, builder: str, model: str) -> None:
    assert_matches(build_case(builder, MODELS[model]), ranks)


@pytest.mark.deep(when=lambda builder: builder not in ("breadth-first", "zb-v"))
@pytest.mark.parametrize("builder", [name for name, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.NO_USE])
def test_virtual_stages_of_every_unit_made_from_sizes(ranks: RankPool, builder: str) -> None:
    """Five layers in four ranges; three and two microbatches on two stages, so that groups are uneven, too."""
    units = described(*MODELS["encoder, LLM and generator"], num_layers=5)
    sizes = {name: UnitSizes(1, 2, 1, 2 if name == "llm" else 1, 2) for name in units}
    plan = plan_disaggregated(source_of(units).graph, sizes=sizes, world_size=8)
    assert_matches(dealt_case(units, fold_stages(plan) if BUILDERS[builder].is_folded else plan, builder=builder), ranks)


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


@pytest.mark.deep(when=lambda builder, count: (count is MicrobatchCount.PREDICTED) != (builder in ("zb-memory", "zb-v")))
@pytest.mark.parametrize("count", [MicrobatchCount.EFFECTIVE, MicrobatchCount.PREDICTED])
@pytest.mark.parametrize("builder", ["eager-1f1b-memory", "zb-memory", "zb-h1", "zb-v"])
def test_deferral_under_schedules_that_run_ahead(ranks: RankPool, builder: str, count: MicrobatchCount) -> None:
    """Entrain's own rows: merged encoders, its number of microbatches, backwards cut by sample, forwards within memory.

    With the one number its microbatches are as published, with the other encoders are balanced by themselves.
    """
    options = {"microbatch_count": count, "refines_encoders": count is MicrobatchCount.PREDICTED}
    case = balanced_case("entrain", "two encoders and LLM", builder=builder, merges_encoders=True, **options)
    cluster = SCARCE if BUILDERS[builder].needs_costs else None
    assert_matches(replace(case, passes=(split_backward,), cluster=cluster), ranks)


@pytest.mark.parametrize("builder", ["interleaved-1f1b", "zb-v"])
def test_microbatches_in_the_order_chosen_for_virtual_stages(ranks: RankPool, builder: str) -> None:
    case = balanced_case("disttrain", "encoder, LLM and generator", builder=builder, refines_encoders=builder == "zb-v")
    assert_matches(case, ranks)


@pytest.mark.parametrize(
    ("model", "exchanges_samples"),
    [("two encoders and LLM", False), ("two encoders and LLM", True), ("encoder, LLM and generator", False)],
)
def test_batches_rearranged_over_nodes(ranks: RankPool, model: str, exchanges_samples: bool) -> None:
    """Two nodes of two ranks that all units share: batches of encoders and generators change places, and nothing else."""
    case = build_case("1f1b", MODELS[model])
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


@pytest.mark.deep(when=lambda name: name != "orchmllm")  # the others weigh units by the same costs
@pytest.mark.parametrize("name", [name for name, row in BALANCERS.items() if row.weighs_units])
def test_units_of_declared_costs(ranks, name):
    """The encoders as if they padded (Alg. 4 and 5), the LLM with attention's square (Alg. 2's other form)."""
    costs = {"vision": "padded", "audio": "padded-attention:0.1", "llm": "linear+quadratic:0.01"}
    declared = {unit: LengthCost.from_text(text) for unit, text in costs.items()}
    assert_matches(balanced_case(name, "two encoders and LLM", unit_costs=declared), ranks)


FLAGS = {**SIZED_OTHERWISE, "--num-workers": LEFT_OUT, "--global-batch-size": 4, "--llm-tp": 2, "--colocate-units": None}


def test_rearranged_batches_train_the_same(tmp_path: Path) -> None:
    """The LLM's two replicas are a node each; two of four images would be encoded on the other node."""
    rearranged, exchanged = (
        train(tmp_path, FLAGS | how, num_ranks=4, environment={"LOCAL_WORLD_SIZE": "2"})[0]
        for how in ({"--rearrange-nodes": None}, {"--lengths-from": "decode"})
    )
    assert [entry["loss"] for entry in rearranged] == pytest.approx([entry["loss"] for entry in exchanged], rel=1e-9)
    assert all(entry["node_bytes"]["before"] > entry["node_bytes"]["after"] == 0 for entry in rearranged)
    assert all("exchanged_node_bytes" not in entry for entry in rearranged)
    assert all("node_bytes" not in entry and entry["exchanged_node_bytes"] > 0 for entry in exchanged)
