"""Schedules of layer ranges dealt in turn: breadth-first, its rounds, and chains of several units that interleave."""

from collections.abc import Mapping, Sequence

import pytest

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders.breadth_first import build_breadth_first
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, chain_of_replica
from multimodal.values.action import ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.schedule import Lane
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import SHAPE, PlacedCase, build_graph

Ranks = Sequence[Sequence[int]]
"""Per replica the rank of every stage."""


def graph_of(*names: str) -> ModelGraph:
    graph = build_graph(*(name for name in names if name not in ("llm", "painter")))
    if "painter" not in names:
        return graph
    return ModelGraph((*graph.units, Unit("painter", Role.GENERATOR, SHAPE)), (*graph.edges, ("llm", "painter")))


def on_ranks(ranks: Mapping[str, Ranks], *, chunks: Mapping[str, int], num_microbatches: int) -> StepShape:
    """Units on any ranks; one sample, one item of each encoder and one drawing per microbatch, dealt round robin."""
    graph = graph_of(*ranks)
    units, groupings = {}, {}
    for index, name in enumerate(graph.unit_names):
        replicas = ranks[name]
        pieces = split_layers(graph.unit(name).layers, num_stages=len(replicas[0]) * chunks.get(name, 1))
        units[name] = UnitPlan(
            tuple(
                Replica(tuple(Stage((rank,), pieces[stage :: len(replica)]) for stage, rank in enumerate(replica)))
                for replica in replicas
            )
        )
        item = index if graph.unit(name).role is Role.ENCODER else -1
        groupings[name] = tuple(
            tuple((Atom(sample, item),) for sample in range(replica, num_microbatches, len(replicas)))
            for replica in range(len(replicas))
        )
    return Assignment(groupings).shape(graph, Plan(units))


def computed(lane: Lane) -> list[tuple[str, str, int, int]]:
    return [
        (action.kind.value, action.unit, action.stage, action.microbatch) for action in lane.actions if action.microbatch >= 0
    ]


def test_backwards_of_an_encoder_go_by_the_last_microbatch_that_each_serves() -> None:
    """The first of its two serves microbatches 0 and 3 of the LLM, the second 1 and 2; both wait for their first layer range."""
    graph = build_graph("vision")
    pieces = split_layers(graph.unit("vision").layers, num_stages=2)
    whole = ((0, len(graph.backbone.layers)),)
    ranges = {"vision": Stage((0,), pieces), "llm": Stage((1,), whole)}
    plan = Plan({name: UnitPlan((Replica((stage,)),)) for name, stage in ranges.items()})
    encoded = tuple(tuple(Atom(sample, 0) for sample in samples) for samples in ((0, 3), (1, 2)))
    placed = Assignment({"vision": (encoded,), "llm": (tuple((Atom(sample),) for sample in range(4)),)})
    lane, _ = build_breadth_first(placed.shape(graph, plan)).lanes
    order = [(stage, microbatch) for kind, _, stage, microbatch in computed(lane) if kind == "B"]
    assert order == [(1, 1), (1, 0), (0, 1), (0, 0)]


def test_an_encoder_in_the_llms_first_lane_and_a_generator_in_its_last_share_its_rounds() -> None:
    ranks = {"vision": [[0]], "llm": [[0, 1]], "painter": [[1]]}
    first, last = build_breadth_first(on_ranks(ranks, chunks={"llm": 2}, num_microbatches=2)).lanes
    assert computed(first) == [
        *[("F", unit, 0, microbatch) for microbatch in range(2) for unit in ("vision", "llm")],
        *[("F", "llm", 2, 0), ("F", "llm", 2, 1), ("B", "llm", 2, 0), ("B", "llm", 2, 1)],
        *[("B", unit, 0, microbatch) for microbatch in range(2) for unit in ("llm", "vision")],
    ]
    assert computed(last) == [
        *[("F", "llm", 1, 0), ("F", "llm", 1, 1)],
        *[("F", unit, stage, microbatch) for microbatch in range(2) for unit, stage in (("llm", 3), ("painter", 0))],
        *[("B", unit, stage, microbatch) for microbatch in range(2) for unit, stage in (("painter", 0), ("llm", 3))],
        *[("B", "llm", 1, 0), ("B", "llm", 1, 1)],
    ]


def test_of_encoders_with_unequal_stages_all_microbatches_that_the_llm_takes_first_come_first() -> None:
    ranks = {"vision": [[0, 1]], "audio": [[0]], "llm": [[2, 3]]}
    shared = build_breadth_first(on_ranks(ranks, chunks={"llm": 2}, num_microbatches=3)).lanes[0]
    forwards = [microbatch for kind, _, _, microbatch in computed(shared) if kind == "F"]
    assert forwards == [0, 0, 1, 1, 2, 2]


def placed(samples: Mapping[str, Sequence[Sequence[Sequence[tuple[int, int]]]]]) -> StepShape:
    ranks = iter(range(9))
    units = {name: UnitPlan(tuple(Replica((Stage((next(ranks),), ((0, 10),)),)) for _ in each)) for name, each in samples.items()}
    return Assignment.from_dict(samples).shape(graph_of(*samples), Plan(units))


def test_backwards_of_a_generator_go_as_the_llm_needs_them() -> None:
    """Of two microbatches, the second is linked to the LLM's first and third."""
    drawn = [[[(1, -1)], [(0, -1), (2, -1)]]]
    last = build_breadth_first(placed({"llm": [[[(0, -1)], [(1, -1)], [(2, -1)]]], "painter": drawn})).lanes[1]
    assert [(kind, microbatch) for kind, _, _, microbatch in computed(last)] == [("F", 0), ("F", 1), ("B", 1), ("B", 0)]


LAYERS = 10
"""Of every unit: an embedding, eight transformer layers, a projector or head."""


def build_chain(cuts: dict[str, list[int]], *, num_lanes: int, num_microbatches: int) -> PlacedCase:
    """cuts: unit -> where its layers are cut; pieces go to lanes in turn, in the order of the chain."""
    position, units = -1, {}
    for unit, ends in cuts.items():
        held: dict[int, list[tuple[int, int]]] = {}
        for first, end in zip([0, *ends], [*ends, LAYERS], strict=True):
            position += 1
            held.setdefault(position % num_lanes, []).append((first, end))
        units[unit] = UnitPlan((Replica(tuple(Stage((lane,), tuple(ranges)) for lane, ranges in held.items())),))
    graph = build_graph(*(unit for unit in cuts if unit != "llm"))
    samples = range(num_microbatches)
    encoders = {unit.name: (tuple((Atom(sample, index),) for sample in samples),) for index, unit in enumerate(graph.encoders)}
    assignment = Assignment({**encoders, "llm": (tuple((Atom(sample),) for sample in samples),)})
    return PlacedCase(assignment.shape(graph, Plan(units)), assignment)


def chain_text(case: StepShape, unit_of_position: list[tuple[str, int]], lane: int) -> list[tuple[str, int, int]]:
    """A lane's computations as (kind, position in the chain, microbatch)."""
    number = {key: position for position, key in enumerate(unit_of_position)}
    return [
        (action.kind.value, number[action.unit, action.stage], action.microbatch)
        for action in build_interleaved_1f1b(case).lanes[lane].actions
        if action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    ]


@pytest.mark.parametrize("num_microbatches", [4, 6])
def test_a_chain_of_two_units_runs_as_one_unit_does(num_microbatches: int) -> None:
    # Three pieces of the encoder and five of the LLM on two lanes: the LLM's lanes hold 3 and 2 chunks.
    chain = build_chain({"vision": [3, 6], "llm": [2, 4, 6, 8]}, num_lanes=2, num_microbatches=num_microbatches)
    alone = build_chain({"llm": [1, 2, 3, 4, 5, 6, 7]}, num_lanes=2, num_microbatches=num_microbatches)
    places = [("vision", stage) for stage in range(3)] + [("llm", stage) for stage in range(5)]
    for lane in range(2):
        assert chain_text(chain.shape, places, lane) == chain_text(alone.shape, [("llm", stage) for stage in range(8)], lane)


def test_one_unit_may_end_and_the_next_begin_in_one_chunk() -> None:
    graph = build_graph("vision")
    vision = UnitPlan((Replica((Stage((0,), ((0, 5),)), Stage((1,), ((5, 10),)))),))
    llm = UnitPlan((Replica((Stage((1,), ((0, 3), (6, 10))), Stage((0,), ((3, 6),)))),))
    assignment = Assignment({"vision": (((Atom(0, 0),), (Atom(1, 0),)),), "llm": (((Atom(0),), (Atom(1),)),)})
    plan = Plan({"vision": vision, "llm": llm})
    assert chain_of_replica(assignment.shape(graph, plan), 0) == (
        (("vision", 0),),
        (("vision", 1), ("llm", 0)),
        (("llm", 1),),
        (("llm", 2),),
    )
    built = build_schedule(build_interleaved_1f1b, assignment.shape(graph, plan))
    computed = [(a.kind, a.unit, a.stage) for a in built.lanes[1].actions if a.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    assert computed[:2] == [(ActionKind.FORWARD, "vision", 1), (ActionKind.FORWARD, "llm", 0)]
    assert computed[-2:] == [(ActionKind.BACKWARD, "llm", 0), (ActionKind.BACKWARD, "vision", 1)]


def test_what_is_not_one_chain_is_not_taken_for_one() -> None:
    in_turn = build_chain({"vision": [3, 6], "llm": [2, 4, 6, 8]}, num_lanes=2, num_microbatches=4)
    assert chain_of_replica(in_turn.shape, 0) is not None
    one_round = build_chain({"vision": [5], "llm": [5]}, num_lanes=4, num_microbatches=4)
    assert chain_of_replica(one_round.shape, 0) is None
    swapped = in_turn.assignment.units["vision"][0]
    decoupled = Assignment({**in_turn.assignment.units, "vision": ((swapped[1], swapped[0], *swapped[2:]),)})
    assert chain_of_replica(decoupled.shape(in_turn.shape.graph, in_turn.shape.plan), 0) is None
