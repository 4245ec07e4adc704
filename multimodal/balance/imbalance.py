"""How evenly an assignment spreads a unit's work."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from multimodal.balance.batch_work import BatchWork
from multimodal.values.assignment import Assignment, Microbatch


class Imbalance(NamedTuple):
    """Of one unit's work in one global batch; 1.0 is perfect balance."""

    replica: float
    """Largest over mean cost of the replicas: how long the others wait for the slowest."""
    microbatch: float
    """Largest over mean cost of all microbatches."""
    microbatch_std: float
    """Standard deviation of the microbatches' costs, as a share of their mean."""


def unit_imbalance(assignment: Assignment, work: BatchWork, *, unit: str) -> Imbalance:
    """Measure one unit; a unit without work is balanced. O(atoms)."""
    replicas = [[_cost(work, unit, microbatch) for microbatch in replica] for replica in assignment.units[unit]]
    microbatches = [cost for replica in replicas for cost in replica]
    mean = fmean(microbatches) if microbatches else 0.0
    deviation = pstdev(microbatches) / mean if mean else 0.0
    return Imbalance(largest_over_mean([sum(replica) for replica in replicas]), largest_over_mean(microbatches), deviation)


def largest_over_mean(costs: Sequence[float]) -> float:
    """Return max / mean; 1.0 where there is nothing."""
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0


def _cost(work: BatchWork, unit: str, microbatch: Microbatch) -> float:
    return work.cost(unit).batch_cost(work.amounts(unit, [(atom,) for atom in microbatch]))
