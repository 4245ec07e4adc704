import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.kernels import kernels
from multimodal.values.arrays.placed_atoms import PlacedAtoms
from multimodal.values.arrays.rows import group_rows_reference, order_by, row_numbers, row_starts, take_rows
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


OWNERS = st.lists(st.integers(0, 5), max_size=20)


@given(owners=OWNERS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_grouping_in_cpp_equals_its_reference(owners: list[int]) -> None:
    column, values = np.array(owners, np.int64), np.arange(len(owners))[::-1].copy()
    found, wanted = (group(column, values, 6) for group in (kernels.group_rows, group_rows_reference))
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_an_owner_that_is_no_row_is_refused() -> None:
    with pytest.raises(IndexError, match="no row"):
        kernels.group_rows(np.array([3]), np.array([0]), 3)


@given(pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=20))
def test_several_keys_order_as_tuples_do(pairs: list[tuple[int, int]]) -> None:
    columns = np.array(pairs).T
    assert order_by(*columns).tolist() == sorted(range(len(pairs)), key=pairs.__getitem__)


@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), data=st.data())
def test_rows_are_taken_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    values = np.array([value for row in rows for value in row], np.int64)
    starts, values = take_rows(row_starts(list(map(len, rows))), values, np.array(chosen, np.int64))
    assert [part.tolist() for part in np.split(values, starts[1:-1])][: len(chosen)] == [rows[index] for index in chosen]
    assert row_numbers(starts).tolist() == [number for number, index in enumerate(chosen) for _ in rows[index]]
