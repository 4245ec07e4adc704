"""Compares a balancer's assignments with the data loader's order, batch by batch."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from multimodal.balance import BalancerRow
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.in_order import balance_in_order
from multimodal.balance.rearrange_nodes import NodeBytes, rearrange_nodes
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.validate import validate_assignment


class UnitMeasure(NamedTuple):
    """Measures of one unit in one batch."""

    before: Imbalance
    after: Imbalance
    traffic: NodeBytes


@dataclass
class BalanceMeasure:
    """Measures of several batches."""

    units: dict[str, list[UnitMeasure]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return means over batches, and the median of the milliseconds of a whole batch."""
        milliseconds = 1e3 * statistics.median(self.seconds)
        return {
            "units": {unit: {**self._means(unit), "milliseconds": milliseconds} for unit in self.units},
            "milliseconds": milliseconds,
            "num_batches": len(self.seconds),
        }

    def _means(self, unit: str) -> dict[str, Any]:
        def mean(name: str) -> float:
            return statistics.fmean(map(attrgetter(name), self.units[unit]))

        return {
            "replica_imbalance": mean("after.replica"),
            "microbatch_imbalance": mean("after.microbatch"),
            "replica_imbalance_of_longest": mean("after.replica_of_longest"),
            "microbatch_imbalance_of_longest": mean("after.microbatch_of_longest"),
            "replica_imbalance_before": mean("before.replica"),
            "microbatch_imbalance_before": mean("before.microbatch"),
            "microbatch_time_std": {when: mean(f"{when}.microbatch_std") for when in ("before", "after")},
            "inter_node_bytes": {when: mean(f"traffic.{when}") for when in ("before", "after")},
        }


def measure_balance(
    balancer: BalancerRow,
    batches: Iterable[Sequence[SampleLengths]],
    *,
    graph: ModelGraph,
    plan: Plan,
    options: BalanceOptions,
    bytes_per_token: Mapping[str, int],
) -> BalanceMeasure:
    """Balance every batch; bytes_per_token: of what each unit takes from the network. Raises AssignmentError."""
    measure = BalanceMeasure({name: [] for name in graph.unit_names})
    for lengths in batches:
        start = time.perf_counter()
        assignment = balancer(lengths, graph=graph, plan=plan, options=options)
        measure.seconds.append(time.perf_counter() - start)
        validate_assignment(assignment, lengths, graph=graph, plan=plan)
        work = BatchWork(graph, lengths, options)
        before = balance_in_order(work, plan=plan)
        for unit, measures in measure.units.items():
            volume = moved_volume(before, assignment, work, unit=unit, bytes_per_token=bytes_per_token[unit])
            traffic = measure_traffic(volume, ranks_per_node=options.ranks_per_node)
            evened = unit_imbalance(assignment, work, unit=unit)
            measures.append(UnitMeasure(unit_imbalance(before, work, unit=unit), evened, traffic))
    return measure


def moved_volume(before: Assignment, after: Assignment, work: BatchWork, *, unit: str, bytes_per_token: int) -> csr_matrix:
    """Return [num_replicas, num_replicas] bytes of each batch of `after` that each replica loaded for `before`. O(atoms)."""
    loaded, made = before.placed[unit], after.placed[unit]
    of_atoms = work.of_unit(unit).num_tokens
    sources = np.zeros(len(of_atoms), np.int64)
    sources[work.numbers(unit, loaded)] = loaded.replica_of_microbatch[loaded.microbatch_of_atom]
    atoms = work.numbers(unit, made)
    entries = bytes_per_token * of_atoms[atoms], (sources[atoms], made.replica_of_microbatch[made.microbatch_of_atom])
    return csr_matrix(entries, shape=(made.num_replicas, made.num_replicas))


def measure_traffic(volume: csr_matrix, *, ranks_per_node: int) -> NodeBytes:
    """Compare the most bytes that a rank sends to other nodes without and with node-wise rearrangement (OrchMLLM, Alg. 3)."""
    arranged = rearrange_nodes(volume, ranks_per_node=ranks_per_node)
    return NodeBytes(int(arranged.bytes_before.max()), int(arranged.bytes_after.max()))
