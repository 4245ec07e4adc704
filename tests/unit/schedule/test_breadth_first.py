"""Schedules of layer ranges dealt in turn: breadth-first, its rounds, and chains of several units that interleave."""

import pytest

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, chain_of_replica
from multimodal.values.action import ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import PlacedCase, build_graph, written_case

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
    plan = {"vision": "0|1", "llm": "1|0 (0-3,6-10|3-6)"}
    shape = written_case(plan, {"vision": "0|1", "llm": "0|1"}).shape
    assert chain_of_replica(shape, 0) == (
        (("vision", 0),),
        (("vision", 1), ("llm", 0)),
        (("llm", 1),),
        (("llm", 2),),
    )
    built = build_schedule(build_interleaved_1f1b, shape)
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
