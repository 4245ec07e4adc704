"""Seconds of a step's computations, for all microbatches of a unit at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.pieces.stage_costs import COMPUTATIONS, StageCosts
from multimodal.cost.stage_layers import StageKey
from multimodal.cost.step_costs import ComputeCost
from multimodal.cost.unit_load import ComputedLoad, Floats, UnitLoad
from multimodal.values.action import Action
from multimodal.values.step_graph import StepGraph
from multimodal.values.step_work import KINDS, Integers, StepWork

_ROW_OF_KIND = np.array([COMPUTATIONS.index(kind) if kind in COMPUTATIONS else -1 for kind in KINDS])


@dataclass(frozen=True)
class ComputationSeconds:
    """What the loads of a step take in its stages."""

    step: StepGraph
    loads: AssignedLoads
    stages: StageCosts

    def of_action(self, action: Action) -> ComputeCost:
        """Return the cost of one computation; the backward of a sample subset costs its atoms' share."""
        row = int(self.step.assignment.placed[action.unit].microbatch_starts[action.replica]) + action.microbatch
        if action.subset >= 0:
            row = int(self.loads.routes_from(action.unit).subset_starts[row]) + action.subset
        found = self.of_unit(action.unit, of_subsets=action.subset >= 0)
        return ComputeCost(*found[:, COMPUTATIONS.index(action.kind), action.stage, row].tolist())

    def of_pieces(self, work: StepWork, pieces: Integers) -> Floats:
        """[2, num_pieces] seconds, and of these the waits for collectives inside layers."""
        found = np.zeros((2, len(pieces)))
        stages, parts = work.computed_stages[pieces], work.pieces.parts[pieces]
        for number, unit in enumerate(work.pieces.units):
            is_own = work.pieces.unit_of_stage[stages] == number
            for of_subsets in (False, True):
                chosen = np.flatnonzero(is_own & ((parts >= 0) == of_subsets))
                if not len(chosen):
                    continue
                rows = work.pieces.numbers_in_unit[pieces[chosen]]
                if of_subsets:
                    rows = self.loads.routes_from(unit).subset_starts[rows] + parts[chosen]
                kinds, indices = _ROW_OF_KIND[work.kinds[pieces[chosen]]], work.pieces.index_of_stage[stages[chosen]]
                found[:, chosen] = self.of_unit(unit, of_subsets=of_subsets)[:, kinds, indices, rows]
        return found

    def of_replicas(self, unit: str) -> Floats:
        """[num_stages, num_replicas] seconds of all forwards and backwards of each stage."""
        placed, seconds = self.step.assignment.placed[unit], self.of_unit(unit)[0]
        shape = seconds.shape[1], placed.num_replicas
        needs = [self.step.backward_need(unit, replica, stage).has_backward for stage, replica in np.ndindex(shape)]
        has_backward = np.array(needs, bool).reshape(shape)[:, placed.replica_of_microbatch]
        of_both = np.where(has_backward, seconds[0] + seconds[1], seconds[0])
        return np.stack([np.bincount(placed.replica_of_microbatch, row, placed.num_replicas) for row in of_both])

    def of_unit(self, unit: str, *, of_subsets: bool = False) -> Floats:
        """[2, kinds, num_stages, num_rows] seconds of the `COMPUTATIONS`, and of these the waits for collectives inside layers.

        Rows are the unit's microbatches, or the sample subsets of all of them in the order of `StepGraph.consumers`.
        """
        if (unit, of_subsets) not in self._known:
            replicas, rows = self.step.assignment.placed[unit].replica_of_microbatch, self._rows(unit, of_subsets)
            if of_subsets:
                replicas = np.repeat(replicas, np.diff(self.loads.routes_from(unit).subset_starts))
            found = np.zeros((2, len(COMPUTATIONS), self.step.plan.units[unit].num_virtual_stages, len(replicas)))
            for stage, where in self.stages.alike(unit):
                chosen = np.flatnonzero(np.asarray(where.any(axis=0))[replicas])
                seconds = self._of_rows(stage, rows, chosen)
                for index in np.flatnonzero(where.any(axis=1)).tolist():
                    is_here = where[index, replicas[chosen]]
                    found[:, :, index, chosen[is_here]] = seconds[:, :, is_here]
            if self.stages.options.zero_stage >= 3 and not of_subsets:
                found += self._waits_for_the_slowest(unit, found[0])
            self._known[unit, of_subsets] = found
        return self._known[unit, of_subsets]

    def _rows(self, unit: str, of_subsets: bool) -> UnitLoad | Sequence[ComputedLoad]:
        """Return loads as arrays, or one by one where context parallel ranks share their tokens."""
        if self.step.plan.units[unit].context_parallel_size > 1:
            return self.loads.computed(unit, of_subsets=of_subsets)
        return self.loads.of_subsets(unit) if of_subsets else self.loads.of_microbatches(unit)

    def _of_rows(self, stage: StageKey, rows: UnitLoad | Sequence[ComputedLoad], chosen: Integers) -> Floats:
        """[2, kinds, num_chosen] seconds of a stage's computations of some rows."""
        if isinstance(rows, UnitLoad):
            columns: list[Any] = [np.asarray(column)[chosen] for column in rows]
            return self.stages.computations(stage, ComputedLoad(UnitLoad(*columns)))
        loads = [rows[row] for row in chosen.tolist()]
        different = {load: self.stages.computations(stage, load) for load in dict.fromkeys(loads)}
        return np.stack([different[load] for load in loads], axis=-1) if loads else np.zeros((2, len(COMPUTATIONS), 0))

    def _waits_for_the_slowest(self, unit: str, seconds: Floats) -> Floats:
        """Return how long each computation waits for the slowest replica's of the same number: they have common weights."""
        placed = self.step.assignment.placed[unit]
        counts = [self.step.assignment.num_own_microbatches(unit, replica) for replica in range(placed.num_replicas)]
        own = np.flatnonzero(placed.index_in_replica < np.array(counts, np.int64)[placed.replica_of_microbatch])
        index, late = placed.index_in_replica[own], np.zeros_like(seconds)
        slowest = np.zeros((*seconds.shape[:2], int(placed.counts.max(initial=0))))
        np.maximum.at(slowest.T, index, seconds[:, :, own].T)
        late[:, :, own] = slowest[:, :, index] - seconds[:, :, own]
        return late

    @cached_property
    def _known(self) -> dict[tuple[str, bool], Floats]:
        return {}
