import pickle

import numpy as np
from hypothesis import given

from multimodal.values.arrays.placed_atoms import PlacedAtoms
from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace, Route
from tests.unit.schedule.schedule_cases import PlacedCase, placed_cases, placed_golden_cases


def plain_routes(step: PlacedCase) -> list[Route]:
    """Every route, found atom by atom."""
    between: dict[tuple[MicrobatchPlace, MicrobatchPlace], list[Atom]] = {}
    for source, target in step.shape.graph.edges:
        places = {
            atom: (replica, index)
            for replica, microbatches in enumerate(step.assignment.units[source])
            for index, microbatch in enumerate(microbatches)
            for atom in microbatch
        }
        for replica, microbatches in enumerate(step.assignment.units[target]):
            for index, microbatch in enumerate(microbatches):
                for taken in microbatch:  # an item, where the target is an encoder
                    atoms = [taken] if taken.item_index >= 0 else [each for each in places if each.sample_id == taken.sample_id]
                    for atom in sorted(atoms):
                        ends = MicrobatchPlace(source, *places[atom]), MicrobatchPlace(target, replica, index)
                        between.setdefault(ends, []).append(atom)
    return [Route(*ends, tuple(atoms)) for ends, atoms in sorted(between.items())]


@given(step=placed_cases())
def test_routes_lead_every_atom_to_its_sample(step: PlacedCase) -> None:
    wanted = plain_routes(step)
    found = step.assignment.routes(step.shape.graph)
    assert [route for place in found.from_source for route in found.from_source[place]] == wanted
    for end, by_end in enumerate((found.from_source, found.to_target)):
        assert {place: list(routes) for place, routes in by_end.items()} == {
            route[end]: [other for other in wanted if other[end] == route[end]] for route in wanted
        }
    assert MicrobatchPlace("llm", 0, 99) not in found.to_target and MicrobatchPlace("nothing", 0, 0) not in found.from_source


@given(step=placed_cases())
def test_an_assignment_of_arrays_is_the_one_of_objects(step: PlacedCase) -> None:
    given_objects = step.assignment
    arrays = Assignment.of_arrays({unit: PlacedAtoms.of_replicas(each) for unit, each in given_objects.units.items()})
    for other in (arrays, pickle.loads(pickle.dumps(arrays)), Assignment.from_dict(arrays.to_dict())):
        assert other == given_objects and other.to_dict() == given_objects.to_dict()
        for place in step.shape.microbatches:
            assert other.atoms(place) == given_objects.units[place.unit][place.replica][place.microbatch]
            assert other.num_microbatches(*place[:2]) == len(given_objects.units[place.unit][place.replica])


def test_samples_are_kept_where_they_are() -> None:
    placed = placed_golden_cases()["crossed_groupings"].assignment.placed["llm"]
    kept = placed.with_samples(placed.sample_ids[:1])
    atoms = [atom for replica in kept.replicas for microbatch in replica for atom in microbatch]
    assert atoms == [Atom(int(placed.sample_ids[0]))] and kept.num_replicas == placed.num_replicas
    assert kept != placed and placed.with_samples(np.unique(placed.sample_ids)) == placed
