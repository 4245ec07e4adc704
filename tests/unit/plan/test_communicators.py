"""The communicators of a plan, the size of a checkpoint, and layers cut into stages."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.cost.layers.adapters import resolve_adapters
from multimodal.cost.layers.registry import linear_layers
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import CheckpointSize, checkpoint_size
from multimodal.plan import communicators
from multimodal.plan.partition_layers import partition_layers, partition_unit, range_seconds, unit_pieces
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.action import ActionKind
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.shape import StepShape
from tests.unit.plan.planners.planning_cases import LLM
from tests.unit.schedule.schedule_cases import build_graph, built_cases

DIRECTIONS = {ActionKind.SEND_FORWARD: "forward", ActionKind.SEND_BACKWARD: "backward"}


@settings(max_examples=60)
@given(built=built_cases())
def test_every_message_goes_between_partners_on_a_track_of_the_plan(built: tuple[StepShape, str]) -> None:
    case, builder = built
    partners = {
        rank: communicators.message_partners(case.graph, case.plan, rank=rank) for lane in case.plan.lanes for rank in lane
    }
    assert len({tuple(tracks) for tracks in partners.values()}) == 1, "all ranks make the same communicators in one order"
    for lane in insert_communication(BUILDERS[builder](case)).lanes:
        for action in lane.actions:
            if action.kind in DIRECTIONS and action.peer is not None:
                track = communicators.track_of(DIRECTIONS[action.kind], action.place, action.peer)
                targets = case.plan.virtual_stage(*action.peer[:3]).ranks
                sources = case.plan.virtual_stage(*action.place[:3]).ranks
                for source, target in zip(sources, targets, strict=action.unit == action.peer.unit):
                    if source != target:
                        assert target in partners[source][track].targets
                        assert source in partners[target][track].sources


def test_partners_are_stages_beside_a_rank_and_everybody_at_the_other_end_of_an_edge() -> None:
    graph = build_graph("vision")
    sizes = {
        "vision": UnitSizes(pipeline_parallel_size=1, data_parallel_size=2),
        "llm": UnitSizes(pipeline_parallel_size=2, data_parallel_size=2),
    }
    plan = plan_disaggregated(graph, sizes=sizes, world_size=6)
    found = communicators.message_partners(graph, plan, rank=2)  # first stage of the first replica; 4 is its second
    assert found[communicators.Track("forward", 0)] == ({4}, frozenset())
    assert found[communicators.Track("backward", 0)] == (frozenset(), {4})
    assert found[communicators.Track("forward", communicators.BETWEEN_UNITS)] == (frozenset(), {0, 1})
    assert found[communicators.Track("backward", communicators.BETWEEN_UNITS)] == ({0, 1}, frozenset())
    assert {(0, 1), (2, 3), (4, 5)} <= set(communicators.group_ranks(graph, plan))
    assert communicators.max_communicators_per_rank(graph, plan) == 1 + 4 + 1


def test_thousands_of_ranks_have_as_few_communicators_as_some() -> None:
    graph = ModelGraph.from_file(Path(__file__).parents[3] / "examples" / "models" / "vit-22b-vit-11b-gpt-175b.yaml")
    first, second = (unit.name for unit in graph.encoders)
    sizes = {
        first: UnitSizes(tensor_parallel_size=4, data_parallel_size=128),
        second: UnitSizes(tensor_parallel_size=2, data_parallel_size=256),
        "llm": UnitSizes(tensor_parallel_size=8, context_parallel_size=2, pipeline_parallel_size=4, data_parallel_size=32),
    }
    plan = plan_disaggregated(graph, sizes=sizes, world_size=3072)
    assert communicators.max_communicators_per_rank(graph, plan) <= 16


WIDTH, INNER, VOCABULARY = 8, 32, 40
LAYER = 4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH
EMBEDDING = VOCABULARY * WIDTH
"""Attention, a gated MLP, and two norms."""


def build_model(**settings: object) -> ModelGraph:
    shape = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH, "ffn_hidden_size": INNER}
    return ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape, **settings}}})


def size_of(graph: ModelGraph, num_ranks: int, *, zero_stage: int = 1, width: int = 2, **sizes: int) -> CheckpointSize:
    plan = plan_disaggregated(graph, sizes={"llm": UnitSizes(**sizes)}, world_size=num_ranks)
    return checkpoint_size(StageLayers(graph, plan, VOCABULARY), bytes_per_element=width, zero_stage=zero_stage)


@pytest.mark.parametrize(("width", "state"), [(2, 12), (4, 8), (8, 16)])
def test_one_rank_writes_all(width: int, state: int) -> None:
    total = (width + state) * (2 * LAYER + 2 * EMBEDDING + WIDTH)
    assert size_of(build_model(), 1, width=width) == CheckpointSize(total, 3, total, total)


def test_tied_embeddings_are_saved_once() -> None:
    assert size_of(build_model(untie_embeddings_and_output_weights=False), 1).num_bytes == 14 * (2 * LAYER + EMBEDDING + WIDTH)


def test_replicas_share_what_is_written_and_copy_what_each_holds() -> None:
    whole = 2 * LAYER + 2 * EMBEDDING + WIDTH
    for zero_stage, copied in ((0, 14 * whole / 2), (1, (2 + 12 / 3) * whole / 2), (3, 14 / 3 * whole / 2)):
        size = size_of(build_model(), 6, zero_stage=zero_stage, tensor_parallel_size=2, data_parallel_size=3)
        assert size == CheckpointSize(14 * whole, 8, round(14 * whole / 6), round(copied))


def test_the_largest_stage_counts_and_units_on_the_same_ranks_add_up() -> None:
    first = size_of(build_model(), 2, pipeline_parallel_size=2)
    assert first.most_written_bytes == 14 * (LAYER + EMBEDDING + WIDTH)
    image = {"patch_size": 2, "in_channels": 3, "merge_size": 2}
    shape = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": WIDTH, "ffn_hidden_size": INNER}
    units = {"vision": {"role": "encoder", "image": image, **shape}, "llm": {"role": "backbone", **shape}}
    graph = ModelGraph.from_dict({"units": units})
    layers = StageLayers(graph, plan_colocated(graph, sizes={}, world_size=2), VOCABULARY)
    both = checkpoint_size(layers, bytes_per_element=2, zero_stage=1)
    assert both.most_written_bytes == pytest.approx(both.num_bytes / 2, abs=1)


def test_of_frozen_units_weights_alone_are_saved() -> None:
    graph = build_model(freeze_module=True, lora={"rank": 2, "targets": ["linear_qkv"]})
    graph = resolve_adapters(graph, linear_layers(graph))
    adapters = 2 * 2 * (WIDTH + 3 * WIDTH)
    whole = 2 * LAYER + 2 * EMBEDDING + WIDTH
    assert size_of(graph, 1).num_bytes == 2 * (whole + adapters) + 12 * adapters


def test_replicas_that_share_experts_copy_their_own_ones() -> None:
    """Of optimizer state a rank has as much as ever: a smaller part of the experts', which fewer ranks share."""
    graph = build_model(experts={"num_experts": 4, "router_topk": 2, "ffn_hidden_size": INNER})
    apart, shared = (size_of(graph, 4, data_parallel_size=4, expert_parallel_size=each) for each in (1, 2))
    experts = 2 * 4 * 3 * WIDTH * INNER
    assert apart.most_copied_bytes - shared.most_copied_bytes == 2 * experts / 2
    assert shared[:3] == apart[:3]
    apart, shared = (size_of(graph, 4, zero_stage=0, data_parallel_size=4, expert_parallel_size=each) for each in (1, 2))
    assert apart.most_copied_bytes - shared.most_copied_bytes == 14 * experts / 2


def brute_force(seconds: list[float], num_stages: int) -> float:
    cuts = itertools.combinations(range(1, len(seconds)), num_stages - 1)
    return min(max(sum(seconds[first:end]) for first, end in itertools.pairwise((0, *cut, len(seconds)))) for cut in cuts)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_the_slowest_range_is_as_fast_as_any_cut_allows(seconds, data):
    num_stages = data.draw(st.integers(1, len(seconds)))
    ranges = partition_layers(seconds, num_stages=num_stages)
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(len(seconds)))
    assert len(ranges) == num_stages and all(first < end for first, end in ranges)
    assert max(range_seconds(seconds, ranges)) == brute_force(seconds, num_stages)


def test_equally_good_cuts_are_spread_evenly():
    assert partition_layers([1.0] * 7, num_stages=3) in (
        ((0, 3), (3, 5), (5, 7)),
        ((0, 2), (2, 5), (5, 7)),
        ((0, 2), (2, 4), (4, 7)),
    )


def test_a_heavy_head_gets_fewer_transformer_layers():
    assert partition_unit(LLM, [0.0, *[1.0] * 8, 4.0], num_stages=2) == ((0, 7), (7, 10))


def test_ends_of_a_unit_stay_with_a_transformer_layer():
    assert unit_pieces(LLM)[0] == (0, 2) and unit_pieces(LLM)[-1] == (8, 10) and len(unit_pieces(LLM)) == 8


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanError, match=r"unit 'llm': 8 transformer layers cannot be cut into 9 stages"):
        partition_unit(LLM, [1.0] * 10, num_stages=9)
