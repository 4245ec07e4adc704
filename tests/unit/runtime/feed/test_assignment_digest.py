import hashlib

import numpy as np
from hypothesis import given

from megatron.runtime.feed.agreement import assignment_digest
from multimodal.values.arrays.placed_atoms import PlacedAtoms
from multimodal.values.assignment import Assignment
from tests.unit.schedule.schedule_cases import PlacedCase, placed_cases


def plain_digest(assignment: Assignment) -> int:
    """Number by number: unit, replica, sizes of microbatches, atoms."""
    digest = hashlib.blake2b(digest_size=8)
    for unit in sorted(assignment.units):
        digest.update(unit.encode())
        for replica in assignment.units[unit]:
            numbers = [number for microbatch in replica for atom in microbatch for number in atom]
            digest.update(np.array([len(replica), *map(len, replica), *numbers], np.int64).tobytes())
    return int.from_bytes(digest.digest()) >> 2


@given(step=placed_cases())
def test_arrays_and_objects_have_one_digest(step: PlacedCase) -> None:
    units = step.assignment.units
    arrays = Assignment.of_arrays({unit: PlacedAtoms.of_replicas(replicas) for unit, replicas in units.items()})
    assert assignment_digest(step.assignment) == assignment_digest(arrays) == plain_digest(step.assignment)
