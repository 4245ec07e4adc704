"""Schedules of replicas that differ: reductions by ranges of layers that the same ranks hold, in one order everywhere."""

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_lanes
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, LayerRange
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import build_graph
from tests.unit.schedule.schedule_text import schedule_from_text, schedule_to_text
from tests.unit.schedule.uniform_costs import UniformCosts

DEEP = Replica((Stage((0,), ((0, 4),)), Stage((1,), ((4, 10),))))
WIDE = Replica((Stage((2, 3), ((0, 7),), 2), Stage((4, 5), ((7, 10),), 2)))


def build_step(graph: ModelGraph, counts: tuple[int, int] = (2, 1)) -> StepShape:
    """Two replicas of an LLM of ten layers: cut behind the fourth, and behind the seventh on twice as many ranks."""
    samples = iter(range(sum(counts)))
    placed = {"llm": tuple(tuple((Atom(next(samples)),) for _ in range(count)) for count in counts)}
    return Assignment(placed).shape(graph, Plan({"llm": UnitPlan((DEEP, WIDE))}))


WHOLE = """\
lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; B llm/0/0/1; RG llm/0/0[0:4]
lane 1: F llm/0/1/0; B llm/0/1/0; F llm/0/1/1; B llm/0/1/1; RG llm/0/1[3:6]; RG llm/0/1[0:3]
lane 2,3: F llm/1/0/0; B llm/1/0/0; RG llm/1/0[4:7]; RG llm/1/0[0:4]
lane 4,5: F llm/1/1/0; B llm/1/1/0; RG llm/1/1[0:3]
"""
BY_LAYER = """\
lane 0: F llm/0/0/0; F llm/0/0/1; B llm/0/0/0; RG llm/0/0[1:4]; B llm/0/0/1; RG llm/0/0[0:1]
lane 1: F llm/0/1/0; B llm/0/1/0; F llm/0/1/1; RG llm/0/1[4:6]; RG llm/0/1[3:4]; RG llm/0/1[1:3]; \
B llm/0/1/1; RG llm/0/1[0:1]
lane 2,3: F llm/1/0/0; RG llm/1/0[5:7]; RG llm/1/0[4:5]; RG llm/1/0[1:4]; B llm/1/0/0; RG llm/1/0[0:1]
lane 4,5: F llm/1/1/0; RG llm/1/1[1:3]; B llm/1/1/0; RG llm/1/1[0:1]
"""


@pytest.mark.parametrize(("passes", "text"), [((), WHOLE), ((reduce_by_layer,), BY_LAYER)], ids=["whole", "by layer"])
def test_reductions_are_cut_where_any_replica_is(passes, text):
    step = build_step(build_graph())
    schedule = BUILDERS["1f1b"](step)
    for rewrite in passes:
        schedule = rewrite(schedule)
    validate_schedule(schedule)
    assert schedule_to_text(schedule) == text
    read = schedule_from_text(text, step)
    assert read == schedule and read.shape.cuts == schedule.shape.cuts


def test_layers_that_are_not_trained_are_not_reduced():
    """Of a frozen encoder the projector alone, in its last layer."""
    graph = build_graph("vision", frozen=["vision"])
    vision = UnitPlan((DEEP, WIDE))
    llm = UnitPlan((Replica((Stage((6,), ((0, 10),)),)),))
    nothing = Assignment({"vision": ((), ()), "llm": ((),)})
    work = BUILDERS["gpipe"](nothing.shape(graph, Plan({"vision": vision, "llm": llm}))).work
    reduced = [action for action in work.computed if action.kind is ActionKind.REDUCE_GRADIENTS and action.unit == "vision"]
    assert [(*action[2:4], action.covers) for action in reduced] == [(0, 1, LayerRange(3, 6)), (1, 1, LayerRange(0, 3))]


class ReductionSeconds(UniformCosts):
    """As long as layers are many."""

    def collective_seconds(self, action: Action) -> float:
        return float(action.covers.end - action.covers.first)


def test_a_range_is_reduced_when_all_who_hold_it_have_come_to_it():
    """The second replica's only microbatch is done long before the first one's three."""
    schedule = BUILDERS["1f1b"](build_step(build_graph(), counts=(3, 1)))
    assert not execute_lanes(schedule).stuck
    events = simulate_schedule(schedule, ReductionSeconds()).timeline.events
    last = max(event.end_seconds for event in events if event.action[:4] == (ActionKind.BACKWARD, "llm", 0, 1))
    reduced = {
        event.action[2:4]: event.end_seconds
        for event in events
        if event.action.kind is ActionKind.REDUCE_GRADIENTS and event.action.covers in (LayerRange(0, 3), LayerRange(3, 6))
    }
    # Layers 7 to 9 take 3 seconds after the first replica's last backward; then layers 4 to 6 take as many.
    assert reduced[1, 1] == pytest.approx(last + 3) and reduced[0, 1] == pytest.approx(last + 6)
