"""Checks before each step, by a digest in one small reduction, that all ranks decided alike; also leaves out bad samples."""

import hashlib
import logging
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.launch.failure import StopReason
from megatron.runtime.step.step import Step
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError, DataError
from multimodal.values.schedule import Schedule


def assignment_digest(assignment: Assignment) -> int:
    """Return a number below 2^62 that two different assignments share with negligible probability. O(atoms)."""
    digest = hashlib.blake2b(digest_size=8)
    for unit, placed in sorted(assignment.placed.items()):
        digest.update(unit.encode())
        sizes, atoms = np.diff(placed.atom_starts), np.column_stack((placed.sample_ids, placed.item_indices))
        for first, last in pairwise(placed.microbatch_starts.tolist()):
            digest.update(np.append(last - first, sizes[first:last]).tobytes())
            digest.update(atoms[placed.atom_starts[first] : placed.atom_starts[last]].tobytes())
    return int.from_bytes(digest.digest()) >> 2


def decision_digest(assignment: Assignment, schedule: Schedule) -> int:
    """Return such a number for an assignment and the order of its work, if the order depends on more than the assignment."""
    digest = hashlib.blake2b(assignment_digest(assignment).to_bytes(8), digest_size=8)
    for array in (schedule.lane_starts, schedule.pieces, schedule.modes, schedule.waits):
        digest.update(array.tobytes())
    return int.from_bytes(digest.digest()) >> 2


def check_agreement(
    step: Step, *, number: int, wait_seconds: float, stop: StopReason, device: torch.device
) -> tuple[float, StopReason]:
    """Compare this step's assignment on all ranks; collective. Raises AssignmentError, on all, with the first difference.

    wait_seconds: time that this rank waited for the step; stop: this rank's wish. Returns the largest of each over all ranks.
    """
    told = torch.tensor([step.digest, -step.digest, round(1e6 * wait_seconds), stop], dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    largest, smallest, wait_us, largest_stop = told.tolist()
    if largest != -smallest:
        places = {
            (unit, *atom): (replica_index, microbatch_index, index)
            for unit, replicas in step.assignment.units.items()
            for replica_index, replica in enumerate(replicas)
            for microbatch_index, microbatch in enumerate(replica)
            for index, atom in enumerate(microbatch)
        }
        gathered = gather_objects(places)
        differing = ((rank, found) for rank, other in enumerate(gathered) if (found := _difference(gathered[0], other)))
        rank, difference = next(differing, (0, ""))
        if not difference:
            raise AssignmentError(
                f"step {number}: ranks ordered the work of the same assignment differently, because their costs differ; give all "
                "ranks the same --cluster"
            )
        raise AssignmentError(
            f"step {number}: rank {rank} decided otherwise than rank 0: {difference}. All ranks must see the same data (check "
            "that --data-path has the same content on every node) and run the same flags, seed and version of Braid"
        )
    return wait_us / 1e6, StopReason(largest_stop)


def agree_to_stop(stop: StopReason, *, device: torch.device) -> StopReason:
    """Return the strongest reason to stop of any rank; collective."""
    told = torch.tensor([stop], dtype=torch.int64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return StopReason(int(told.item()))


_Positions = Mapping[tuple[str, int, int], tuple[int, int, int]]
"""(unit, sample, item) -> (replica, microbatch, index within it)."""


def _difference(first: _Positions, other: _Positions) -> str:
    """Describe the difference between two ranks' placements, by the first unit, sample and item; empty if there is none."""
    for key in sorted({*first, *other}):
        if first.get(key) != other.get(key):
            unit, sample, item = key
            what = f"sample {sample}" if item < 0 else f"item {item} of sample {sample}"
            place = "in replica {}, microbatch {}, at {}"
            there, here = (place.format(*placed[key]) if key in placed else "nowhere" for placed in (other, first))
            return f"unit '{unit}', {what} is {there} there and {here} on rank 0"
    return ""


_FEWEST_SEEN = 1000
logger = logging.getLogger(__name__)


class BadSamples:
    """Those that some rank could not read, over a run."""

    def __init__(self, most_per_thousand: float) -> None:
        self._most_per_thousand, self._num_bad, self._num_seen = most_per_thousand, 0, 0

    def leave_out(self, step: Step, *, device: torch.device) -> Step:
        """Return the step without what any rank could not read; collective. Raises DataError on all if that is too much."""
        self._num_seen += len(step.lengths)
        told = torch.tensor([len(step.problems)], dtype=torch.int64, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if not told.item():
            return step
        gathered = gather_objects(dict(step.problems))
        problems = {sample: problem for of_rank in reversed(gathered) for sample, problem in of_rank.items()}
        for problem in problems.values():
            logger.info("left out a sample that cannot be read: %s", problem)
        self._num_bad += len(problems)
        check_share(self._num_bad, self._num_seen, most_per_thousand=self._most_per_thousand, problem=problem)
        if not (found := step.without(problems)).loss_divisor:
            raise DataError(f"no sample of a global batch can be read, such as: {problem}; repair the data")
        return found


def check_share(num_bad: int, num_samples: int, *, most_per_thousand: float, problem: str) -> None:
    """Raise DataError for more bad samples than allowed among these, or among a thousand if these are fewer."""
    if num_bad > most_per_thousand * max(_FEWEST_SEEN, num_samples) / 1000:
        raise DataError(
            f"{num_bad} of {num_samples} samples cannot be read, and no more than {most_per_thousand:g} per thousand are left "
            f"out: {problem}; repair the data, or raise --bad-samples-per-thousand"
        )
