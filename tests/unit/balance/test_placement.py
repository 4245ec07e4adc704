import pytest

from multimodal.balance.placement import drop_idle_samples, place_generators
from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace, PlacedAtoms
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_assignment

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", **SHAPE},
            **{name: {"role": "generator", **SHAPE} for name in ("painter", "engraver")},
        }
    }
)
LENGTHS = tuple(
    SampleLengths(sample, tuple(ItemLengths(unit, 4, 0) for unit in units), 5, 5)
    for sample, units in enumerate([("painter",), (), ("engraver", "painter"), ("painter", "painter"), ("engraver",)])
)
LLM = (((Atom(0), Atom(1)), (Atom(4),)), ((Atom(2), Atom(3)),))


@pytest.fixture(scope="module")
def plan(build_plan):
    return build_plan(llm=2, painter=1, engraver=3)


@pytest.fixture(scope="module")
def generators(plan):
    placed = place_generators(PlacedAtoms.of_replicas(LLM), graph=GRAPH, plan=plan)
    return {unit: atoms.replicas for unit, atoms in placed.items()}


def test_generators_follow_the_llm_in_its_order(generators) -> None:
    assert generators["painter"] == ((LLM[0][0], LLM[1][0], LLM[0][1]),)
    assert generators["engraver"] == ((LLM[0][0],), (LLM[1][0],), (LLM[0][1],))


def test_a_generator_keeps_the_llms_placement_where_replicas_have_unequally_many_microbatches(build_plan) -> None:
    llm = (((Atom(0),),), ((Atom(1),), (Atom(2),)), ((Atom(3),), (Atom(4),)))
    placed = place_generators(PlacedAtoms.of_replicas(llm), graph=GRAPH, plan=build_plan(llm=3, painter=3, engraver=1))
    assert placed["painter"].replicas == llm
    assert placed["engraver"].replicas == (tuple((Atom(sample),) for sample in (0, 1, 3, 2, 4)),)


def test_samples_without_work_are_dropped_and_so_are_empty_microbatches(plan, generators) -> None:
    assignment = Assignment({"llm": LLM, **generators})
    kept = drop_idle_samples(assignment, graph=GRAPH, lengths=LENGTHS)
    assert kept.units["llm"] == LLM
    assert kept.units["painter"] == (((Atom(0),), (Atom(2), Atom(3))),)
    assert kept.units["engraver"] == ((), ((Atom(2),),), ((Atom(4),),))
    for each in (assignment, kept):
        validate_assignment(each, LENGTHS, graph=GRAPH, plan=plan)
    routes = kept.routes(GRAPH).from_source
    assert [route.target.unit for route in routes[MicrobatchPlace("llm", 0, 0)]] == ["painter"]
    assert [route.target.unit for route in routes[MicrobatchPlace("llm", 1, 0)]] == ["engraver", "painter"]


def test_a_sample_with_work_must_be_placed(plan) -> None:
    units = {"llm": LLM, "painter": (((Atom(0),), (Atom(3),)),), "engraver": (((Atom(2), Atom(4)),), (), ())}
    with pytest.raises(AssignmentError, match="unit 'painter': sample 2 is placed nowhere"):
        validate_assignment(Assignment(units), LENGTHS, graph=GRAPH, plan=plan)


def test_nothing_changes_without_generators() -> None:
    graph = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **SHAPE}}})
    assignment = Assignment({"llm": LLM})
    assert drop_idle_samples(assignment, graph=graph, lengths=LENGTHS) is assignment
