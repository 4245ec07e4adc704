"""Predicted peaks of activations against what the runtime counts in real steps on several ranks."""

import gc
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron.runtime.execution.activation_store import storage_identity
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import Cluster
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import StepMemory, layer_static_bytes
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph, Transformer
from multimodal.values.plan import Plan
from tests.distributed.dealt_case import unit_plan
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, sharded_layers
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

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


PEAKS = {"trained": (GRAPH, "1f1b", None), "recomputed": (GRAPH, "1f1b", "full"), "frozen": (FROZEN, "gpipe", "full")}
DEEP_PEAKS = {"selectively": (GRAPH, "1f1b", "selective"), "gpipe": (GRAPH, "gpipe", None), "frozen 1f1b": (FROZEN, "1f1b", None)}


@pytest.mark.deep(when=lambda name: name in DEEP_PEAKS)
@pytest.mark.parametrize("name", [*PEAKS, *DEEP_PEAKS])
def test_peaks_are_predicted(ranks, name):
    graph, builder, recompute = (PEAKS | DEEP_PEAKS)[name]
    check(ranks, case_of(graph, PLAN, builder=builder, recompute=recompute))


def test_peaks_with_more_between_stages_are_predicted(ranks: RankPool) -> None:
    check(ranks, case_of(DEEPSTACK, PLAN))


@pytest.mark.deep(when=lambda sequence_parallel: not sequence_parallel)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_peaks_of_tensor_parallel_ranks_are_predicted(ranks, sequence_parallel):
    check(ranks, case_of(GRAPH, TENSOR_PLAN, sequence_parallel=sequence_parallel))


def case_of(graph: ModelGraph, plan: Plan, **options) -> GradientCase:
    source = RandomSource(graph, SAMPLES, VOCABULARY)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions(vocab_size=VOCABULARY))
    return GradientCase(graph, plan, assignment, source, **options)


def check(ranks: RankPool, case: GradientCase) -> None:
    measured = ranks.run(measured_bytes, case, world_size=case.plan.num_ranks)
    assert predicted_bytes(case) == pytest.approx(measured, rel=0.1)


SIZES = {"vision": (1, 1, 2), "llm": (2, 1, 2)}
SPREAD = {"vision": (1, 1, 1, 2), "llm": (1, 2, 1, 2)}
"""With context parallelism."""
WIDE = Transformer(2, 64, 4, 192)
TRAINED, FROZEN_VISION = (
    replace(graph, units=(replace(graph.unit("vision"), transformer=WIDE), graph.unit("llm")))
    for graph in (build_graph(frozen=frozen, hidden_size=64) for frozen in ((), ("llm",)))
)
"""Wide enough for norms and biases, which the model leaves out, to be few."""
BYTES = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2}


def held_bytes(case: TrainingCase) -> int:
    """What a rank holds after a step more than before it built anything; runs on a rank."""
    gc.collect()
    before = {identity for identity, _ in _storages()}
    training = Training(case)
    training.train_step(0)
    for optimizer in training.session.optimizers.values():
        optimizer.zero_grad()
    gc.collect()
    return sum({identity: size for identity, size in _storages() if identity not in before}.values())


def _storages() -> list[tuple[int, int]]:
    """(identity, bytes) of the storages of all tensors, but for what is as small as a step count."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [each.untyped_storage() for each in tensors]
    return [(storage._cdata, storage.nbytes()) for storage in storages if storage.nbytes() > 16]


def expected_bytes(case: TrainingCase, *, zero_stage: int) -> list[float]:
    layers = StageLayers(case.graph, case.plan, case.vocab_size)
    found = []
    for rank in range(case.plan.num_ranks):
        total = 0.0
        for stage in layers.of_rank[rank]:
            sizes = case.plan.units[stage[0]]
            num_trained = layers.num_weights(stage, trained_only=True)
            num_frozen = layers.num_weights(stage, trained_only=False) - num_trained
            total += (
                sum(
                    layer_static_bytes(
                        num_weights,
                        is_trained=is_trained,
                        data_parallel_size=sizes.data_parallel_size * sizes.context_parallel_size,
                        zero_stage=zero_stage,
                        bytes_per_element=BYTES[case.dtype],
                    )
                    for num_weights, is_trained in ((num_trained, True), (num_frozen, False))
                )
                / sizes.tensor_parallel_size
            )
        found.append(total)
    return found


@pytest.mark.deep(when=lambda dtype: dtype != torch.bfloat16)
@pytest.mark.parametrize(
    ("graph", "sizes", "dtype"),
    [(TRAINED, SIZES, torch.float32), (TRAINED, SPREAD, torch.bfloat16), (FROZEN_VISION, SPREAD, torch.float64)],
    ids=["trained, float32", "trained, bfloat16", "frozen, float64"],
)
def test_ranks_hold_what_the_memory_model_says(ranks: RankPool, graph: ModelGraph, sizes, dtype: torch.dtype) -> None:
    case = TrainingCase(graph, build_plan(graph, **sizes), dtype=dtype, vocab_size=512)
    zero_stage = 0 if dtype == torch.float64 else 1
    assert run(ranks, held_bytes, case) == pytest.approx(expected_bytes(case, zero_stage=zero_stage), rel=0.1)
    shared = replace(case, shards_weights=True)
    assert run(ranks, held_bytes, shared) == pytest.approx(expected_bytes(case, zero_stage=3), rel=0.1)


def gathered_bytes(case: TrainingCase) -> int:
    """The most that a rank has of gathered weights and of gradients before they are shared, in a step; runs on a rank."""
    training = Training(case)
    parameters = [parameter for stage in training.session.stages.values() for parameter in stage.parameters()]
    under_way: dict[ShardedLayer, int] = {}
    found = [0]
    start, finish, release = ShardedLayer.start_reduction, ShardedLayer.finish_reduction, ShardedLayer.release
    layers = sharded_layers(training.session)

    def count() -> None:
        weights = {storage_identity(each): each.untyped_storage().nbytes() for each in parameters}
        gradients = (each.grad.nbytes for each in parameters if each.grad is not None)
        kept = (layer._unreduced.nbytes for layer in layers if layer._unreduced is not None)
        found.append(sum(weights.values()) + sum(gradients) + sum(under_way.values()) + sum(kept))

    def started(layer: ShardedLayer) -> None:
        start(layer)
        assert layer.gradient_share is not None
        under_way[layer] = layer.gradient_share.nbytes * layer.group.size()
        count()

    def finished(layer: ShardedLayer) -> None:
        count()
        finish(layer)
        under_way.pop(layer, None)

    def released(layer: ShardedLayer) -> None:
        count()
        release(layer)

    with (
        patch.object(ShardedLayer, "start_reduction", started),
        patch.object(ShardedLayer, "finish_reduction", finished),
        patch.object(ShardedLayer, "release", released),
    ):
        training.train_step(0)
    return max(found)


@pytest.mark.deep(when=lambda dtype, once: dtype == torch.float64 or once != (dtype == torch.bfloat16))
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_gathered_at_a_time_is_as_the_memory_model_says(ranks, dtype, once):
    sizes = {"vision": (1, 1, 2), "llm": (1, 2, 2)}
    plan = build_plan(TRAINED, **sizes)
    case = TrainingCase(TRAINED, plan, dtype=dtype, vocab_size=512, shards_weights=True, reduces_once=once)
    measured = run(ranks, gathered_bytes, case)
    assert measured == pytest.approx([working_bytes(case, rank) for rank in range(case.plan.num_ranks)], rel=0.1)


def working_bytes(case: TrainingCase, rank: int) -> float:
    layers = StageLayers(case.graph, case.plan, case.vocab_size)
    nothing = Assignment(dict.fromkeys(case.graph.unit_names, ((),) * 2))
    loads = AssignedLoads(nothing.shape(case.graph, case.plan), nothing, ())
    memory = StepMemory(layers, loads, RunOptions(zero_stage=3, reduces_once=case.reduces_once), BYTES[case.dtype])
    return max(memory.gathered_bytes(stage) + memory.unreduced_bytes(stage) for stage in layers.of_rank[rank])
