from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.schedule.schedule_cases import build_graph


def test_receives_are_hoisted_transitively_over_shared_lanes() -> None:
    """The first consumer needs only the last message, but lane 1 sent another before it, and lane 0 one before that."""
    graph = build_graph("first", "second", "third")
    layers = ((0, 10),)
    ranks = {"first": (0,), "second": (0, 1), "third": (1, 2), "llm": (3,)}
    plan = Plan({unit: UnitPlan((Replica((Stage(group, layers),)),), len(group)) for unit, group in ranks.items()})
    placed = {"first": ((Atom(2, 0),),), "second": ((Atom(1, 0),),), "third": ((Atom(0, 0),),)}
    assignment = Assignment(
        {
            **{unit: (microbatches,) for unit, microbatches in placed.items()},
            "llm": (tuple((Atom(sample),) for sample in range(3)),),
        }
    )
    before = """\
lane 0: F first/0/0/0; F second/0/0/0
lane 1: F second/0/0/0; F third/0/0/0
lane 2: F third/0/0/0
lane 3: F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
"""
    after = """\
lane 0: F first/0/0/0; SF first/0/0/0>llm/0/0/2; F second/0/0/0; SF second/0/0/0>llm/0/0/1
lane 1: F second/0/0/0; SF second/0/0/0>llm/0/0/1; F third/0/0/0; SF third/0/0/0>llm/0/0/0
lane 2: F third/0/0/0; SF third/0/0/0>llm/0/0/0
lane 3: RF llm/0/0/2<first/0/0/0; RF llm/0/0/1<second/0/0/0; RF llm/0/0/0<third/0/0/0; F llm/0/0/0; F llm/0/0/1; F llm/0/0/2
"""
    lowered = insert_communication(schedule_from_text(before, assignment.shape(graph, plan, forward_only=True)))
    assert schedule_to_text(lowered) == after
    validate_schedule(lowered)
