"""Which round of the lanes a stage belongs to, and which of the LLM's microbatches a microbatch serves."""

from multimodal.schedule.builders.breadth_first import pipeline_rounds, served_microbatches
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import SHAPE, build_case, build_graph, deal


def rounds_before(case: StepShape, unit: str, *, replica: int = 0) -> list[int]:
    before = pipeline_rounds(case).before
    return [before[unit, replica, stage] for stage in range(case.plan.units[unit].num_virtual_stages)]


def rounds_after(case: StepShape, unit: str, *, replica: int = 0) -> list[int]:
    after = pipeline_rounds(case).after
    return [after[unit, replica, stage] for stage in range(case.plan.units[unit].num_virtual_stages)]


def encoder_and_llm(
    vision: tuple[int, int], llm: tuple[int, int], *, colocated: bool, layouts: dict[str, dict[str, int]] | None = None
) -> StepShape:
    sizes = {"vision": (*vision, 1), "llm": (*llm, 1)}
    groupings = {"vision": deal(4, vision[0]), "llm": deal(4, llm[0])}
    return build_case(build_graph("vision"), sizes, groupings, colocated=colocated, layouts=layouts)


def test_ranges_dealt_in_turn_are_one_round_each() -> None:
    case = encoder_and_llm((1, 1), (1, 3), colocated=False, layouts={"llm": {"chunks": 2}})
    assert rounds_before(case, "llm") == [1, 1, 1, 2, 2, 2]
    assert rounds_after(case, "llm") == [1, 1, 1, 0, 0, 0]
    assert (rounds_before(case, "vision"), rounds_after(case, "vision")) == ([0], [2])


def test_a_v_turns_at_its_last_stage() -> None:
    case = encoder_and_llm((1, 1), (1, 2), colocated=False, layouts={"llm": {"v_shaped": True}})
    assert rounds_after(case, "llm") == [1, 1, 0, 0]


def test_an_encoder_that_ends_where_the_llm_begins_shares_its_round() -> None:
    case = encoder_and_llm((1, 1), (1, 2), colocated=True, layouts={"llm": {"chunks": 2}})
    assert (rounds_before(case, "vision"), rounds_after(case, "vision")) == ([0], [1])
    assert rounds_before(case, "llm") == [0, 0, 1, 1]


def test_an_encoder_whose_other_copies_feed_the_llm_too_does_not() -> None:
    case = encoder_and_llm((2, 1), (1, 2), colocated=True)
    assert [rounds_after(case, "vision", replica=replica) for replica in range(2)] == [[1], [1]]
    assert rounds_before(case, "llm") == [1, 1]


def test_microbatches_serve_those_that_routes_lead_to_through_any_number_of_units() -> None:
    painter = Unit("painter", Role.GENERATOR, SHAPE)
    graph = build_graph("vision")
    graph = ModelGraph((*graph.units, painter), (*graph.edges, ("llm", "painter")))
    vision = (((Atom(0, 0), Atom(3, 0)), (Atom(2, 0),)),)
    samples = (((Atom(0),), (Atom(1),), (Atom(2),), (Atom(3),)),)
    drawn = (((Atom(3),), (Atom(1), Atom(2))),)
    served = served_microbatches(Assignment({"vision": vision, "llm": samples, "painter": drawn}).shape(graph, Plan()))
    assert {unit: [each.tolist() for each in span] for unit, span in served.items()} == {
        "vision": [[0, 2], [3, 2]],
        "llm": [[0, 1, 2, 3], [0, 1, 2, 3]],
        "painter": [[3, 1], [3, 2]],
    }
