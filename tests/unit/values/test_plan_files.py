"""Plan files with a slip are refused with file, line and fix, and cost neither time nor memory."""

from dataclasses import replace
from typing import Any

import pytest

from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.communicators import expert_parallel_ranks, holders_of_experts, max_communicators_per_rank
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Experts, ModelGraph, Role, Transformer, Unit
from multimodal.values.parts.state_copies import (
    EVERY_REPLICA,
    replicas_of_copies,
    sharers_of_stage,
    sharing_groups,
    state_sharers,
)
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import validate_plan

SHAPE = Transformer(4, 16, 2, 32)
GRAPH = ModelGraph((Unit("llm", Role.BACKBONE, SHAPE),))


def test_a_plan_made_in_python_is_checked_without_listing_its_layers():
    for ranges in (((0, 10**12),), ((0, 3), (3, 10**12)), ((0, 6), (6, 6))):
        plan = Plan({"llm": UnitPlan((Replica((Stage((0,), ranges),)),))})
        with pytest.raises(PlanError, match="must cover layers 0 to 5 once each"):
            validate_plan(plan, graph=GRAPH, world_size=1)


TIED = ModelGraph((Unit("llm", Role.BACKBONE, Transformer(3, 8, 2, 16), untie_embeddings_and_output_weights=False),), ())
"""Five layers: the embeddings and the head beside three."""


def whole(*ranks: int) -> Replica:
    return Replica((Stage(ranks, ((0, 5),), len(ranks)),))


def cut(first: int, second: int) -> Replica:
    return Replica((Stage((first,), ((0, 2),)), Stage((second,), ((2, 5),))))


def test_replicas_are_dealt_to_copies_evenly() -> None:
    unit = UnitPlan(tuple(whole(rank) for rank in range(7)))
    assert replicas_of_copies(unit, 1) == [range(7)]
    assert replicas_of_copies(unit, 3) == [range(2), range(2, 4), range(4, 7)]
    assert replicas_of_copies(unit, EVERY_REPLICA) == [range(rank, rank + 1) for rank in range(7)]


def test_those_share_that_hold_the_same_of_a_layer() -> None:
    unit = UnitPlan((whole(0), cut(1, 2), whole(3, 4), whole(5, 6)))
    assert state_sharers(unit, 1, replicas=range(4), tensor_size=1) == ((0, 1),)
    assert state_sharers(unit, 2, replicas=range(4), tensor_size=1) == ((0, 2),)
    assert state_sharers(unit, 2, replicas=range(4), tensor_size=2) == ((3, 5), (4, 6))
    assert state_sharers(unit, 2, replicas=range(2), tensor_size=2) == ()
    assert list(sharers_of_stage(unit, 0, 0, num_copies=1)) == [(range(2), (0, 1)), (range(2, 5), (0, 2))]
    assert list(sharers_of_stage(unit, 3, 0, num_copies=2)) == [(range(2), (3, 5)), (range(2, 5), (3, 5))]
    assert list(sharers_of_stage(unit, 1, 1, num_copies=EVERY_REPLICA)) == [(range(2, 5), (2,))]


def test_copies_of_tied_embeddings_are_shared_by_last_stages_that_have_them() -> None:
    unit = UnitPlan((whole(0), cut(1, 2), cut(3, 4)))
    assert set(sharing_groups(TIED, "llm", unit, num_copies=1)) == {(0, 1, 3), (0, 2, 4), (2, 4)}
    assert set(sharing_groups(TIED, "llm", unit, num_copies=EVERY_REPLICA)) == {(0,), (1,), (2,), (3,), (4,)}


def test_context_parallel_ranks_share_too() -> None:
    unit = UnitPlan((Replica((Stage((0, 1, 2, 3), ((0, 5),)),)),), tensor_parallel_size=2, context_parallel_size=2)
    assert state_sharers(unit, 0, replicas=range(1), tensor_size=2) == ((0, 2), (1, 3))


EXPERTS_SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
EXPERTS: dict[str, Any] = {"num_experts": 8, "ffn_hidden_size": 12}


def graph_of(experts: dict[str, Any] | None = EXPERTS, **llm: Any) -> ModelGraph:
    given = {} if experts is None else {"experts": experts}
    return ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **EXPERTS_SHAPE, **given, **llm}}})


EXPERTS_GRAPH = graph_of()


def test_experts_are_read_as_they_are_written() -> None:
    assert EXPERTS_GRAPH.backbone.transformer.experts == Experts(8, ffn_hidden_size=12)
    assert EXPERTS_GRAPH.backbone.layers == ("token_embedding", "moe_transformer", "moe_transformer", "head")
    assert ModelGraph.from_dict(EXPERTS_GRAPH.to_dict()) == EXPERTS_GRAPH
    assert "experts" not in graph_of(None).to_dict()["units"]["llm"], "as in files of models without experts"


def plan_of(graph: ModelGraph = EXPERTS_GRAPH, *, tp: int = 1, pp: int = 1, dp: int = 4, ep: int = 2) -> Plan:
    sizes = {"llm": UnitSizes(tp, pp, data_parallel_size=dp, expert_parallel_size=ep)}
    return plan_disaggregated(graph, sizes=sizes, world_size=tp * pp * dp)


def test_plans_with_shared_experts_are_read_as_they_are_written() -> None:
    plan = plan_of()
    assert plan.units["llm"].expert_parallel_size == 2
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "expert_parallel_size" not in plan_of(ep=1).to_dict()["units"]["llm"]


def test_neighbouring_replicas_share_experts() -> None:
    """As Megatron has it: ranks tp-cp-ep-dp-pp."""
    unit = plan_of(tp=2, pp=2, dp=4, ep=2).units["llm"]
    assert [expert_parallel_ranks(unit, 0, rank) for rank in (0, 1, 2, 4, 7)] == [(0, 2), (1, 3), (0, 2), (4, 6), (5, 7)]
    assert [holders_of_experts(unit, 0, rank) for rank in (0, 1, 2, 7)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert expert_parallel_ranks(unit, 1, 8) == (8, 10)
    assert (
        max_communicators_per_rank(EXPERTS_GRAPH, plan_of(tp=2, dp=4, ep=2))
        == max_communicators_per_rank(EXPERTS_GRAPH, plan_of(tp=2, dp=4, ep=1)) + 2
    )


@pytest.mark.parametrize(
    ("replicas", "problem"),
    [
        ([[(1,)], [(0,)]], "must be listed in the order of their ranks"),
        ([[(0,)], [(1,), (2,)]], "and these differ in their stages"),
    ],
)
def test_replicas_that_cannot_share_experts_are_refused(replicas: list[list[tuple[int, ...]]], problem: str) -> None:
    ranges = {1: [((0, 4),)], 2: [((0, 2),), ((2, 4),)]}
    stages = [Replica(tuple(map(Stage, each, ranges[len(each)]))) for each in replicas]
    plan = Plan({"llm": UnitPlan(tuple(stages), expert_parallel_size=2)})
    with pytest.raises(PlanError, match=problem):
        validate_plan(plan, graph=EXPERTS_GRAPH, world_size=plan.num_ranks)


def test_a_token_meets_the_experts_that_are_chosen_for_it() -> None:
    """Of 8 experts, each of 3 x 16 x 12 weights, 2; attention has 4 x 16 x 16, the router 8 x 16."""
    layer = describe_layer(EXPERTS_GRAPH, EXPERTS_GRAPH.backbone, "moe_transformer", vocab_size=0)
    assert layer.num_expert_weights == 8 * 576
    assert layer.num_weights == 8 * 576 + 1024 + 128
    assert layer.forward_flops(UnitLoad(10)).linear == 2 * 10 * (2 * 576 + 1024 + 128)
    chosen = replace(EXPERTS_GRAPH.backbone.transformer, experts=Experts(8, router_topk=8, ffn_hidden_size=12))
    unit = replace(EXPERTS_GRAPH.backbone, transformer=chosen)
    dense = describe_layer(replace(EXPERTS_GRAPH, units=(unit,)), unit, "moe_transformer", vocab_size=0)
    assert dense.forward_flops(UnitLoad(1)).linear == 2 * dense.num_weights


def test_ranks_hold_their_share_of_experts() -> None:
    of_experts, rest = 2 * 8 * 576, 2 * (1024 + 128) + 2 * 16 * 100
    for size in (1, 2, 4):
        layers = StageLayers(EXPERTS_GRAPH, plan_of(ep=size), vocab_size=100)
        held = layers.weights_by_sharers(("llm", 0, 0), trained_only=True)
        assert sum(count for count, _ in held) == rest + of_experts / size
        assert [sharers for _, sharers in held] == ([1] if size == 1 else [1, size])
