"""Bytes of weights, gradients and optimizer state that ranks hold between steps, against the memory model."""

import gc
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megatron.runtime.execution.activation_store import storage_identity
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import StepMemory, layer_static_bytes
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph, Transformer
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

SIZES = {"vision": (1, 1, 2), "llm": (2, 1, 2)}
SPREAD = {"vision": (1, 1, 1, 2), "llm": (1, 2, 1, 2)}
"""With context parallelism."""
WIDE = Transformer(2, 64, 4, 192)
TRAINED, FROZEN = (
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


@pytest.mark.parametrize(
    ("graph", "sizes", "dtype"),
    [(TRAINED, SIZES, torch.float32), (TRAINED, SPREAD, torch.bfloat16), (FROZEN, SPREAD, torch.float64)],
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

    def count() -> None:
        weights = {storage_identity(each): each.untyped_storage().nbytes() for each in parameters}
        gradients = (each.grad.nbytes for each in parameters if each.grad is not None)
        found.append(sum(weights.values()) + sum(gradients) + sum(under_way.values()))

    def started(layer: ShardedLayer, *, is_joined: bool) -> None:
        start(layer, is_joined=is_joined)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_gathered_at_a_time_is_as_the_memory_model_says(ranks: RankPool, dtype: torch.dtype) -> None:
    sizes = {"vision": (1, 1, 2), "llm": (1, 2, 2)}
    case = TrainingCase(TRAINED, build_plan(TRAINED, **sizes), dtype=dtype, vocab_size=512, shards_weights=True)
    measured = run(ranks, gathered_bytes, case)
    assert measured == pytest.approx([working_bytes(case, rank) for rank in range(case.plan.num_ranks)], rel=0.1)


def working_bytes(case: TrainingCase, rank: int) -> float:
    """The memory model's estimate of it."""
    layers = StageLayers(case.graph, case.plan, case.vocab_size)
    nothing = Assignment(dict.fromkeys(case.graph.unit_names, ((),) * 2))
    loads = AssignedLoads(nothing.shape(case.graph, case.plan), nothing, ())
    memory = StepMemory(layers, loads, RunOptions(zero_stage=3), BYTES[case.dtype])
    return max(map(memory.gathered_bytes, layers.of_rank[rank]))
