"""Checks an assignment against the global batch, the model and the plan that it was made for."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from multimodal.values.arrays.rows import Integers
from multimodal.values.assignment import Assignment, Atom, PlacedAtoms
from multimodal.values.errors import AssignmentError
from multimodal.values.length_arrays import LengthArrays, LengthBatch
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def validate_assignment(assignment: Assignment, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan) -> None:
    """Check that every atom of a global batch is placed exactly once, in a replica that exists, and that no microbatch is empty.

    A generator need not be assigned samples without anything for it to generate.
    """
    arrays = LengthBatch.of(lengths).arrays
    for name in graph.unit_names:
        if name not in assignment.placed:
            raise AssignmentError(f"the assignment says nothing of unit '{name}'")
        placed, num_replicas = assignment.placed[name], plan.units[name].data_parallel_size
        if placed.num_replicas != num_replicas:
            raise AssignmentError(f"unit '{name}': the assignment has {placed.num_replicas} replicas, the plan {num_replicas}")
        if not np.diff(placed.atom_starts).all():
            raise AssignmentError(f"unit '{name}': a microbatch is empty; leave it out")
        if problem := _misplaced(placed, arrays, role=graph.unit(name).role, unit=name):
            raise AssignmentError(f"unit '{name}': {problem}")


def _misplaced(placed: PlacedAtoms, arrays: LengthArrays, *, role: Role, unit: str) -> str:
    """Describe an error in the places of a unit's atoms; empty if there is none. O(atoms log)."""
    items = arrays.items_of(unit)
    of_items, indices = arrays.sample_ids[arrays.sample_of_item[items]], arrays.index_of_item[items]
    whole = np.full(len(arrays), -1)
    expected = _in_order(of_items, indices) if role is Role.ENCODER else _in_order(arrays.sample_ids, whole)
    found = _in_order(placed.sample_ids, placed.item_indices)
    if np.array_equal(found, expected):
        return ""
    atoms = {Atom(*row) for row in found.tolist()}
    if len(atoms) < len(found):
        repeated, count = next(each for each in sorted(Counter(map(tuple, found.tolist())).items()) if each[1] > 1)
        return f"{_describe(Atom(*repeated))} is placed {count} times; place it once"
    wanted = {Atom(*row) for row in expected.tolist()}
    needed = wanted if role is not Role.GENERATOR else {Atom(sample) for sample in of_items.tolist()}
    if missing := sorted(needed - atoms):
        return f"{_describe(missing[0])} is placed nowhere ({len(missing)} such)"
    if unknown := sorted(atoms - wanted):
        return f"{_describe(unknown[0])} is not in the global batch or not for this unit"
    return ""


def _in_order(sample_ids: Integers, item_indices: Integers) -> Integers:
    """Return atoms as rows, [num_atoms, 2], sorted."""
    order = np.lexsort((item_indices, sample_ids))
    return np.column_stack((sample_ids[order], item_indices[order]))


def _describe(atom: Atom) -> str:
    return f"sample {atom.sample_id}" if atom.item_index < 0 else f"item {atom.item_index} of sample {atom.sample_id}"
