"""Megatron's own process groups from a plan: in every unit those of its grid, given back afterwards, and one plan at a time."""

import re

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.runtime import patches
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.communicators import data_parallel_ranks, holders_of_parameters
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.rank_pool import RankPool
from tests.distributed.small_run import MODEL

GRAPH = ModelGraph.from_dict(MODEL)
OWN_RANKS = plan_disaggregated(
    GRAPH,
    sizes={
        "vision": UnitSizes(tensor_parallel_size=2, data_parallel_size=2),
        "llm": UnitSizes(pipeline_parallel_size=2, context_parallel_size=2),
    },
    world_size=8,
)
SHARED_RANKS = plan_colocated(
    GRAPH,
    sizes={"vision": UnitSizes(data_parallel_size=4), "llm": UnitSizes(tensor_parallel_size=2, pipeline_parallel_size=2)},
    world_size=4,
)
NUM_LAYERS = len(GRAPH.backbone.layers)


def expect_groups(name: str, unit: UnitPlan) -> bool:
    """Compare what Megatron says with a unit's plan; returns whether this rank is in it."""
    rank = dist.get_rank()
    for replica in unit.replicas:
        for index, stage in enumerate(replica.stages):
            if rank not in stage.ranks:
                continue
            position = stage.ranks.index(rank)
            by_context = unit.tensor_parallel_groups(stage)
            context_rank, tensor_rank = divmod(position, unit.tensor_size(stage))
            expected = {
                parallel_state.get_tensor_model_parallel_group: by_context[context_rank],
                parallel_state.get_context_parallel_group: [group[tensor_rank] for group in by_context],
                parallel_state.get_pipeline_model_parallel_group: [each.ranks[position] for each in replica.stages],
                parallel_state.get_data_parallel_group: data_parallel_ranks(unit, index, position),
                lambda: parallel_state.get_data_parallel_group(with_context_parallel=True): holders_of_parameters(
                    unit, index, tensor_rank
                ),
            }
            for ask, ranks in expected.items():
                assert sorted(dist.get_process_group_ranks(ask())) == sorted(ranks), (name, ask)
            assert parallel_state.get_tensor_model_parallel_src_rank() == by_context[context_rank][0]
            assert parallel_state.is_pipeline_first_stage() == (index == 0)
            assert (rank in parallel_state._EMBEDDING_GLOBAL_RANKS) == (index in (0, len(replica.stages) - 1))
            size = unit.tensor_size(stage)
            sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": size}
            config = TransformerConfig(**sizes, perform_initialization=False)
            layer = ColumnParallelLinear(8, 24, config=config, init_method=lambda _: None)
            assert len(layer.weight) == 24 // size, "a layer asks for the groups of its unit"
            return True
    return False


def visit_units(plan: Plan) -> tuple[str, ...]:
    """Apply a plan, look at every unit's groups and undo it; returns this rank's units."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    before = dict(vars(parallel_state))
    try:
        groups = patches.apply(model=GRAPH, plan=plan)
        default = "llm" if "llm" in groups else "vision"
        for name, unit in plan.units.items():
            if name in groups:
                with patches.unit(name):
                    assert expect_groups(name, unit)
                    assert groups[name].tp is parallel_state.get_tensor_model_parallel_group()
            assert expect_groups(default, plan.units[default])
        with pytest.raises(ConfigError, match="plans do not nest; call patches.undo"):
            patches.apply(model=GRAPH, plan=plan)
        for name in plan.units.keys() - groups.keys():
            with pytest.raises(ConfigError, match=f"has nothing of unit '{name}'"), patches.unit(name):
                pass
        dist.barrier()
        patches.undo()
        assert dict(vars(parallel_state)) == before
        with pytest.raises(ConfigError, match="no plan is applied"):
            patches.unit("llm")
        return tuple(groups)
    finally:
        patches.undo()
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("plan", [OWN_RANKS, SHARED_RANKS], ids=["own", "shared"])
def test_every_unit_gets_the_groups_of_its_grid(ranks: RankPool, plan: Plan) -> None:
    found = ranks.run(visit_units, plan, world_size=plan.num_ranks)
    assert found == [tuple(name for name, unit in plan.units.items() if rank in unit.ranks) for rank in range(plan.num_ranks)]


def refusal(plan: Plan | None) -> str:
    """Return what a plan is told."""
    try:
        patches.apply(model=GRAPH, plan=plan)
    except (ConfigError, PlanError) as problem:
        return str(problem)
    finally:
        patches.undo()
    return "nothing"


def llm_plan(*replicas: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]) -> Plan:
    """Return a plan with this LLM and an encoder on rank 0."""
    encoder = UnitPlan((Replica((Stage((0,), ((0, len(GRAPH.unit("vision").layers)),)),)),))
    return Plan({"vision": encoder, "llm": UnitPlan(tuple(Replica(tuple(Stage(*stage) for stage in each)) for each in replicas))})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "needs model and plan together"),
        (llm_plan((((0,), ((0, NUM_LAYERS),)),)), "the plan uses 1 ranks but the run has 2"),
        (
            llm_plan((((0,), ((0, 1), (NUM_LAYERS - 1, NUM_LAYERS))), ((1,), ((1, NUM_LAYERS - 1),)))),
            "chunk c of Megatron's pipeline rank r comes c x pp . r-th",
        ),
        (
            llm_plan((((0,), ((0, NUM_LAYERS),)),), (((1,), ((0, 2),)), ((2,), ((2, NUM_LAYERS),)))),
            "the replicas of unit 'llm' are not alike, .* give all replicas the same stages",
        ),
    ],
)
def test_plans_that_megatron_cannot_express_are_refused(ranks: RankPool, plan: Plan | None, message: str) -> None:
    for found in ranks.run(refusal, plan, world_size=2 if plan is None else max(2, plan.num_ranks)):
        assert re.search(message, found), found
