"""The size of a checkpoint against sums over its parameters; `tests/distributed/test_checkpoint.py` has files of real ones."""

import pytest

from multimodal.cost.layers.adapters import resolve_adapters
from multimodal.cost.layers.registry import linear_layers
from multimodal.cost.stage_layers import StageLayers
from multimodal.plan.checkpoint_size import CheckpointSize, checkpoint_size
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.model_graph import ModelGraph

WIDTH, INNER, VOCABULARY = 8, 32, 40
LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH
EMBEDDING = VOCABULARY * WIDTH
"""Attention, a gated MLP, and two norms."""


def build_graph(**settings: object) -> ModelGraph:
    shape = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH, "ffn_hidden_size": INNER}
    return ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape, **settings}}})


def size_of(graph: ModelGraph, num_ranks: int, *, zero_stage: int = 1, width: int = 2, **sizes: int) -> CheckpointSize:
    plan = plan_disaggregated(graph, sizes={"llm": UnitSizes(**sizes)}, world_size=num_ranks)
    return checkpoint_size(StageLayers(graph, plan, VOCABULARY), bytes_per_element=width, zero_stage=zero_stage)


@pytest.mark.parametrize(("width", "state"), [(2, 12), (4, 8), (8, 16)])
def test_one_rank_writes_all(width: int, state: int) -> None:
    total = (width + state) * (2 * LAYER + 2 * EMBEDDING + WIDTH)
    assert size_of(build_graph(), 1, width=width) == CheckpointSize(total, 3, total, total)


def test_tied_embeddings_are_saved_once() -> None:
    assert size_of(build_graph(untie_embeddings_and_output_weights=False), 1).num_bytes == 14 * (2 * LAYER + EMBEDDING + WIDTH)


def test_replicas_share_what_is_written_and_copy_what_each_holds() -> None:
    whole = 2 * LAYER + 2 * EMBEDDING + WIDTH
    for zero_stage, copied in ((0, 14 * whole / 2), (1, (2 + 12 / 3) * whole / 2), (3, 14 / 3 * whole / 2)):
        size = size_of(build_graph(), 6, zero_stage=zero_stage, tensor_parallel_size=2, data_parallel_size=3)
        assert size == CheckpointSize(14 * whole, 8, round(14 * whole / 6), round(copied))


def test_the_largest_stage_counts_and_units_on_the_same_ranks_add_up() -> None:
    first = size_of(build_graph(), 2, pipeline_parallel_size=2)
    assert first.most_written_bytes == 14 * (LAYER + EMBEDDING + WIDTH)
    image = {"patch_size": 2, "in_channels": 3, "merge_size": 2}
    shape = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH, "ffn_hidden_size": INNER}
    units = {"vision": {"role": "encoder", "image": image, **shape}, "llm": {"role": "backbone", **shape}}
    graph = ModelGraph.from_dict({"units": units})
    layers = StageLayers(graph, plan_colocated(graph, sizes={}, world_size=2), VOCABULARY)
    both = checkpoint_size(layers, bytes_per_element=2, zero_stage=1)
    assert both.most_written_bytes == pytest.approx(both.num_bytes / 2, abs=1)


def test_of_frozen_units_weights_alone_are_saved() -> None:
    graph = build_graph(freeze_module=True, lora={"rank": 2, "targets": ["linear_qkv"]})
    graph = resolve_adapters(graph, linear_layers(graph))
    adapters = 2 * 2 * (WIDTH + 3 * WIDTH)
    whole = 2 * LAYER + 2 * EMBEDDING + WIDTH
    assert size_of(graph, 1).num_bytes == 2 * (whole + adapters) + 12 * adapters


def test_replicas_that_share_experts_copy_their_own_ones() -> None:
    """Of optimizer state a rank has as much as ever: a smaller part of the experts', which fewer ranks share."""
    graph = build_graph(experts={"num_experts": 4, "router_topk": 2, "ffn_hidden_size": INNER})
    apart, shared = (size_of(graph, 4, data_parallel_size=4, expert_parallel_size=each) for each in (1, 2))
    experts = 2 * 4 * 3 * WIDTH * INNER
    assert apart.most_copied_bytes - shared.most_copied_bytes == 2 * experts / 2
    assert shared[:3] == apart[:3]
    apart, shared = (size_of(graph, 4, zero_stage=0, data_parallel_size=4, expert_parallel_size=each) for each in (1, 2))
    assert apart.most_copied_bytes - shared.most_copied_bytes == 14 * experts / 2
