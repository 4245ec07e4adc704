"""The communicators of a plan: all that a run talks over is among them, and they are few."""

from pathlib import Path

from hypothesis import given, settings

from multimodal.plan.colocated import plan_colocated
from multimodal.plan.communicators import (
    BETWEEN_UNITS,
    Track,
    group_ranks,
    max_communicators_per_rank,
    message_partners,
    track_of,
)
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.values.action import ActionKind
from multimodal.values.model_graph import ModelGraph
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_graph, built_cases

DIRECTIONS = {ActionKind.SEND_FORWARD: "forward", ActionKind.SEND_BACKWARD: "backward"}


@settings(max_examples=60)
@given(built=built_cases())
def test_every_message_goes_between_partners_on_a_track_of_the_plan(built: tuple[StepShape, str]) -> None:
    case, builder = built
    partners = {rank: message_partners(case.graph, case.plan, rank=rank) for lane in case.plan.lanes for rank in lane}
    assert len({tuple(tracks) for tracks in partners.values()}) == 1, "all ranks make the same communicators in one order"
    for lane in insert_communication(BUILDERS[builder](case)).lanes:
        for action in lane.actions:
            if action.kind in DIRECTIONS and action.peer is not None:
                track = track_of(DIRECTIONS[action.kind], action.place, action.peer)
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
    found = message_partners(graph, plan, rank=2)  # first stage of the first replica; 4 is its second
    assert found[Track("forward", 0)] == ({4}, frozenset())
    assert found[Track("backward", 0)] == (frozenset(), {4})
    assert found[Track("forward", BETWEEN_UNITS)] == (frozenset(), {0, 1})
    assert found[Track("backward", BETWEEN_UNITS)] == ({0, 1}, frozenset())
    assert {(0, 1), (2, 3), (4, 5)} <= set(group_ranks(graph, plan))
    assert max_communicators_per_rank(graph, plan) == 1 + 4 + 1


def test_a_rank_alone_has_one_communicator() -> None:
    graph = build_graph("vision")
    plan = plan_colocated(graph, sizes={name: UnitSizes() for name in graph.unit_names}, world_size=1)
    assert max_communicators_per_rank(graph, plan) == 1


def test_thousands_of_ranks_have_as_few_communicators_as_some() -> None:
    graph = ModelGraph.from_file(Path(__file__).parents[3] / "examples" / "models" / "vit-22b-vit-11b-gpt-175b.yaml")
    first, second = (unit.name for unit in graph.encoders)
    sizes = {
        first: UnitSizes(tensor_parallel_size=4, data_parallel_size=128),
        second: UnitSizes(tensor_parallel_size=2, data_parallel_size=256),
        "llm": UnitSizes(tensor_parallel_size=8, context_parallel_size=2, pipeline_parallel_size=4, data_parallel_size=32),
    }
    plan = plan_disaggregated(graph, sizes=sizes, world_size=3072)
    assert max_communicators_per_rank(graph, plan) <= 16
