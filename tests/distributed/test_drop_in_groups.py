"""Megatron's own process groups from a plan: in every unit those of its grid, given back afterwards, and one plan at a time."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Linear

from megatron.runtime import patches, platform
from megatron.runtime.drop_in.balanced_data import count_numbers, find_problem
from megatron.runtime.drop_in.forward_backward import REFUSALS, ForwardBackward, check_options
from megatron.runtime.drop_in.modules_on_ranks import LoopInputs, check_modules, modules_of_plan, read_modules
from megatron.runtime.drop_in.pipeline_schedule import (
    RUNNABLE,
    LoopModule,
    PipelineShape,
    build_pipeline_schedule,
    step_of_pipeline,
)
from megatron.runtime.drop_in.split_backward import prepare_split
from multimodal.plan.communicators import data_parallel_ranks, holders_of_parameters
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.values.action import ActionKind
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.errors import ConfigError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import Schedule, lane_of
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work
from tests.distributed.rank_pool import RankPool
from tests.distributed.small_run import MODEL
from tests.unit.golden_answers import Kinds, golden_test

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
    for number, replica in enumerate(unit.replicas):
        for index, stage in enumerate(replica.stages):
            if rank not in stage.ranks:
                continue
            position = stage.ranks.index(rank)
            by_context = unit.tensor_parallel_groups(stage)
            context_rank, tensor_rank = divmod(position, unit.tensor_size(stage))
            holders = [] if unit.is_unlike else holders_of_parameters(unit, index, tensor_rank)
            expected = {
                parallel_state.get_tensor_model_parallel_group: by_context[context_rank],
                parallel_state.get_context_parallel_group: [group[tensor_rank] for group in by_context],
                parallel_state.get_pipeline_model_parallel_group: [each.ranks[position] for each in replica.stages],
                parallel_state.get_data_parallel_group: [rank] if unit.is_unlike else data_parallel_ranks(unit, index, position),
                lambda: parallel_state.get_data_parallel_group(with_context_parallel=True): holders or [rank],
            }
            for ask, ranks in expected.items():
                assert sorted(dist.get_process_group_ranks(ask())) == sorted(ranks), (name, ask)
            place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
            assert place == (number, len(unit.replicas)), "which data this rank reads"
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


UNLIKE = Plan(
    {
        "vision": UnitPlan((Replica((Stage((0,), ((0, len(GRAPH.unit("vision").layers)),)),)),)),
        "llm": UnitPlan(
            (
                Replica((Stage((1, 2), ((0, NUM_LAYERS),)),)),
                Replica((Stage((3, 4), ((0, 2),)), Stage((5, 6), ((2, NUM_LAYERS),)))),
            ),
            tensor_parallel_size=2,
        ),
    }
)


@pytest.mark.parametrize("plan", [OWN_RANKS, SHARED_RANKS, UNLIKE], ids=["own", "shared", "unlike"])
def test_every_unit_gets_the_groups_of_its_grid(ranks: RankPool, plan: Plan) -> None:
    found = ranks.run(visit_units, plan, world_size=plan.num_ranks)
    assert found == [tuple(name for name, unit in plan.units.items() if rank in unit.ranks) for rank in range(plan.num_ranks)]


def refusal(plan: Plan | None) -> str:
    try:
        patches.apply(model=GRAPH, plan=plan)
    except (ConfigError, PlanError) as problem:
        return str(problem)
    finally:
        patches.undo()
    return "nothing"


def llm_plan(*replicas: tuple[tuple[Any, ...], ...]) -> Plan:
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
            llm_plan((((0,), ((0, NUM_LAYERS),)),), (((1, 2), ((0, NUM_LAYERS),), 2),)),
            r"stages of unit 'llm' have tensor parallel sizes \(1, 2\), .* give all stages one size",
        ),
    ],
)
def test_plans_that_megatron_cannot_express_are_refused(ranks: RankPool, plan: Plan | None, message: str) -> None:
    for found in ranks.run(refusal, plan, world_size=2 if plan is None else max(2, plan.num_ranks)):
        assert re.search(message, found), found


ORIGINAL = schedules.get_forward_backward_func
PIPELINED = schedules.forward_backward_pipelining_without_interleaving
PIPELINE = LoopModule("model", (((0,), (1,)),), num_chunks=2)
SHAPE = PipelineShape((PIPELINE,), num_microbatches=4, forward_only=False)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that imported Megatron's function before anything was replaced."""
    module = ModuleType("some_training_loop")
    module.get_forward_backward_func = ORIGINAL  # type: ignore[attr-defined]
    module.forward_backward_pipelining_without_interleaving = PIPELINED  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(platform, "install", lambda: None)
    yield module
    patches.undo()


def test_the_name_is_replaced_everywhere_and_given_back(loop: ModuleType) -> None:
    patches.apply(schedule="gpipe")
    patches.apply(schedule="1f1b")
    replaced = schedules.get_forward_backward_func
    assert replaced is not ORIGINAL
    assert pipeline_parallel.get_forward_backward_func is replaced and loop.get_forward_backward_func is replaced
    assert loop.forward_backward_pipelining_without_interleaving is replaced()
    patches.undo()
    assert {schedules.get_forward_backward_func, pipeline_parallel.get_forward_backward_func} == {ORIGINAL}
    assert loop.get_forward_backward_func is ORIGINAL and loop.forward_backward_pipelining_without_interleaving is PIPELINED


def test_the_functions_take_what_megatrons_take(loop: ModuleType) -> None:
    patches.apply()
    assert _parameters(schedules.get_forward_backward_func) == _parameters(ORIGINAL)
    function = schedules.get_forward_backward_func(pp_size=2, vp_size=None)
    assert _parameters(function) == _parameters(PIPELINED)


def test_an_unknown_schedule_is_refused(loop: ModuleType) -> None:
    with pytest.raises(ConfigError, match="apply.schedule=....: there is no schedule '2f2b'; choose one of gpipe, "):
        patches.apply(schedule="2f2b")
    assert schedules.get_forward_backward_func is ORIGINAL


def test_modules_elsewhere_than_in_the_plan_are_refused() -> None:
    modules = [
        LoopModule(name, tuple(tuple(each.ranks for each in r.stages) for r in u.replicas)) for name, u in OWN_RANKS.units.items()
    ]
    check_modules(modules, OWN_RANKS.units)
    with pytest.raises(ConfigError, match="module 'vision' has replicas of stages on ranks .* but unit 'vision' of the applied"):
        check_modules([modules[0]._replace(replicas=(((0,),),)), modules[1]], OWN_RANKS.units)
    with pytest.raises(ConfigError, match="unit 'audio' of the applied plan is not there"):
        check_modules([modules[0]._replace(name="audio"), modules[1]], OWN_RANKS.units)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"vision": (((0,),),), "llm": (((0, 1), (2, 3)),)}, "shares some ranks of a stage"),
        ({"vision": (((0,), (1,)),), "llm": (((2,), (3,)),)}, "1 replicas of 2 stages; give it one stage"),
        ({"vision": (((0,),),), "llm": (((1,),), ((2,),))}, "as many replicas as the LLM .2. or a multiple"),
        ({"vision": (((0,),),), "llm": (((1,), (2,)),)}, ""),
    ],
)
def test_encoders_that_a_loops_model_cannot_run_are_refused(ranks: Any, message: str) -> None:
    units = {
        name: UnitPlan(tuple(Replica(tuple(Stage(stage, ((0, 1),)) for stage in each)) for each in replicas))
        for name, replicas in ranks.items()
    }
    model: Any = SimpleNamespace(add_encoder=True, add_decoder=False)
    spread = {name: replace(unit, context_parallel_size=2) for name, unit in units.items()}
    apart = {*units["vision"].ranks}.isdisjoint(units["llm"].ranks)
    with pytest.raises(ConfigError, match="context parallel size 1") if apart else nullcontext():
        assert modules_of_plan(spread, model) == ()
    other: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert [module.name for module in modules_of_plan(units, model)] == ["vision", "language"]
    assert modules_of_plan(units, other) == ()


def test_a_balance_that_takes_samples_apart_is_refused(loop: ModuleType) -> None:
    with pytest.raises(ConfigError, match="balance='orchmllm'.*microbatches move whole.*give one of none, whole-sample"):
        patches.apply(balance="orchmllm")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([([0, 1], [3, 4]), ([0, 1], [5, 6]), ([2, 3], None), ([2, 3], None)], None),
        ([([0, 1], [3]), ([0, 1], None)], "only some read data"),
        ([([0, 1], [3], b"batch"), ([0, 1], [3], b"batch")], r"ranks \[0, 1\] read the same microbatches"),
        ([([0, 1], [3]), ([0, 1], [4]), ([2], [7])], "groups of unlike sizes"),
        ([([0], [3]), ([1], [4])], r"rank 1 reads microbatches of lengths \[4\], but another rank of its replica \[3\]"),
        ([([0], [count_numbers({"ids": [1, 2]})])], "no tensors to count"),
    ],
)
def test_microbatches_that_replicas_cannot_exchange_are_refused(told: Any, message: str | None) -> None:
    problem = find_problem([(*each, bytes(index))[:3] for index, each in enumerate(told)])
    assert problem is None if message is None else problem is not None and re.search(message, problem)


def test_a_loop_can_run_every_kind_that_backwards_need() -> None:
    halves = {ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT}
    assert {action.kind for action in step_work(step_of_pipeline(SHAPE)).actions} == RUNNABLE - halves
    assert set(ActionKind) > RUNNABLE, "nothing is left to refuse"


def test_one_forward_one_backward_is_the_textbooks() -> None:
    schedule = build_pipeline_schedule(
        "1f1b", shape=replace(SHAPE, modules=(PIPELINE._replace(num_chunks=1),), num_microbatches=3)
    )
    assert [[f"{a.kind}{a.microbatch}" for a in lane.actions if a.kind in ("F", "B")] for lane in schedule.lanes] == [
        ["F0", "F1", "B0", "F2", "B1", "B2"],
        ["F0", "B0", "F1", "B1", "F2", "B2"],
    ]


def test_chunks_alternate_between_ranks_as_megatrons_do() -> None:
    (replica,) = step_of_pipeline(SHAPE).plan.units["model"].replicas
    assert [stage.ranks for stage in replica.virtual_stages] == [(0,), (1,), (0,), (1,)]


@pytest.mark.parametrize(
    ("num_encoders", "num_llms", "sources"),
    [
        (1, 1, {(0, 0): [0]}),
        (2, 1, {(0, 0): [0, 1]}),
        (1, 2, {(0, 0): [0], (1, 1): [0]}),
        (4, 2, {(0, 0): [0, 1], (1, 1): [2, 3]}),
    ],
)
def test_modules_replicas_meet_as_megatrons_bridges_let_them(num_encoders: int, num_llms: int, sources: dict[Any, Any]) -> None:
    encoder = LoopModule("vision", tuple(((rank,),) for rank in range(num_encoders)))
    llm = LoopModule("language", tuple(((num_encoders + rank,),) for rank in range(num_llms)))
    step = step_of_pipeline(PipelineShape((encoder, llm), num_microbatches=2, forward_only=False))
    for (replica, microbatch), expected in sources.items():
        found = step.routes.sources_of[MicrobatchPlace("language", replica, microbatch)]
        assert found == tuple(MicrobatchPlace("vision", each, microbatch) for each in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"collection": None}, "needs pg_collection=MultiModuleProcessGroupCollection"),
        ({"variable": False}, "set variable_seq_lengths=True"),
        ({"here": ("vision", "language")}, "give each module ranks of its own"),
        ({"topology": {"vision": ["language"], "language": ["made"], "made": []}}, "let all modules but one send to that one"),
    ],
)
def test_modules_that_a_schedule_cannot_honour_are_refused(changes: dict[str, Any], message: str) -> None:
    topology = changes.get("topology", {"vision": ["language"], "language": []})
    here = dict.fromkeys(changes.get("here", ("vision",)))
    communicator = SimpleNamespace(rank_module_map=here, module_to_grid_map=dict.fromkeys(topology), topology=topology)
    config = SimpleNamespace(variable_seq_lengths=changes.get("variable", True))
    inputs: Any = LoopInputs(max, [], [], config, collect_non_loss_data=False, first_val_step=None)
    with patch.object(dist, "get_rank", lambda: 0), pytest.raises(ConfigError, match=message):
        read_modules(communicator, changes.get("collection", SimpleNamespace(module_pgs={})), inputs, {})


def _last_microbatch_first(step: StepShape) -> Schedule:
    schedule = build_one_f_one_b(step)
    reordered = (
        (a._replace(microbatch=3 - a.microbatch) if a.microbatch >= 0 else a for a in lane.actions) for lane in schedule.lanes
    )
    return schedule.with_lanes(lane_of(lane.ranks, actions) for lane, actions in zip(schedule.lanes, reordered, strict=True))


def test_schedules_that_a_loop_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "odd", replace(BUILDERS["1f1b"], build=_last_microbatch_first))
    order = r"'odd' runs the microbatches of virtual stage 0 in the order \[3, 2, 1, 0\], but the loop's data"
    with pytest.raises(ConfigError, match=order):
        build_pipeline_schedule("odd", shape=SHAPE)


@pytest.mark.parametrize(
    ("chunk", "recompute", "message"),
    [
        (Linear(1, 1), None, "has no linear layer of megatron-core's; give patches.apply.schedule=.... '1f1b'"),
        (Linear(1, 1), "full", "recompute_granularity lets backwards run forwards"),
        (
            SimpleNamespace(parallel_mode="row", wgrad_store=SimpleNamespace(delay_wgrad_compute=lambda: False)),
            None,
            "built without delay",
        ),
    ],
)
def test_layers_that_cannot_delay_their_weight_gradients_are_refused(chunk: Any, recompute: str | None, message: str) -> None:
    if not isinstance(chunk, Linear):
        chunk.modules = lambda: [chunk]
    with pytest.raises(ConfigError, match=message):
        prepare_split(chunk, SimpleNamespace(recompute_granularity=recompute))


@pytest.mark.parametrize("option", REFUSALS)
def test_options_that_would_be_ignored_are_refused(option: str) -> None:
    check_options(_config(), shape=_pipeline(2), num_chunks=1)
    with pytest.raises(ConfigError, match=f"^{option}=.*; .* or call patches.undo"):
        check_options(_config(**{option: "local" if option == "cuda_graph_impl" else True}), shape=_pipeline(2), num_chunks=1)


def test_megatrons_own_sharding_is_refused() -> None:
    sharded: Any = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    sizes = {"num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1}
    with pytest.raises(ConfigError, match="use_megatron_fsdp=True cannot be used .*; leave it out"):
        ForwardBackward(schedule="1f1b").forward_backward(forward_step_func=max, data_iterator=None, model=sharded, **sizes)


def check_sizes(document: dict[str, Any]) -> None:
    shape = _pipeline(document["stages"], document["chunks"])
    check_options(_config(**document["options"]), shape=shape, num_chunks=document["chunks"])


def test_every_refused_option_is_one_of_megatrons() -> None:
    later = {"moe_paged_stash"}
    assert REFUSALS.keys() <= {*TransformerConfig.__dataclass_fields__, *later}


def test_ranks_of_an_encoder_alone_have_one_chunk() -> None:
    shape = PipelineShape((LoopModule("vision", (((4,),),)), *_pipeline(2, 2).modules), num_microbatches=4, forward_only=False)
    config = _config(virtual_pipeline_model_parallel_size=2)
    check_options(config, shape=shape, num_chunks=1, is_llm=False)
    with pytest.raises(ConfigError, match="2 chunks on this rank, .*one chunk where there is only an encoder"):
        check_options(config, shape=shape, num_chunks=2, is_llm=False)
    with pytest.raises(ConfigError, match="1 chunks on this rank, 2 on each of 2 pipeline stages"):
        check_options(_config(), shape=shape, num_chunks=1, is_llm=False)


def _pipeline(num_stages: int, num_chunks: int = 1) -> PipelineShape:
    module = LoopModule("model", (tuple((rank,) for rank in range(num_stages)),), num_chunks)
    return PipelineShape((module,), num_microbatches=4, forward_only=False)


def _config(**options: Any) -> Any:
    defaults = {"virtual_pipeline_model_parallel_size": None, "pipeline_dtype": "float64", "cuda_graph_impl": "none"}
    return SimpleNamespace(**{**defaults, **options})


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(name, one.kind, one.default) for name, one in inspect.signature(function).parameters.items()]


SIZES: Kinds = {"sizes": ({"options": {}, "stages": 2, "chunks": 1}, check_sizes)}
test_sizes_that_do_not_fit_are_refused = golden_test("drop_in.txt", SIZES)
