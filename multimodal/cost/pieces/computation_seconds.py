"""Seconds of a step's computations, for all microbatches of a unit at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.memoize import memoized
from multimodal.cost.pieces.stage_costs import COMPUTATIONS, StageCosts
from multimodal.cost.step_costs import ComputeCost
from multimodal.cost.unit_load import ComputedLoad, UnitLoad
from multimodal.values.action import Action, ActionKind, SegmentRange
from multimodal.values.arrays.rows import Floats, Integers, row_numbers, row_starts
from multimodal.values.parts.cuts import StageKey
from multimodal.values.work.step_work import KINDS, StepWork

_ROW_OF_KIND = np.array([COMPUTATIONS.index(kind) if kind in COMPUTATIONS else -1 for kind in KINDS])


@dataclass(frozen=True)
class ComputationSeconds:
    """Seconds of a step's loads in its stages."""

    loads: AssignedLoads
    stages: StageCosts

    def of_action(self, action: Action) -> ComputeCost:
        """Return the cost of one computation; the backward of a sample subset costs its atoms' share."""
        row = int(self.loads.assignment.placed[action.unit].microbatch_starts[action.replica]) + action.microbatch
        if action.subset >= 0:
            row = int(self.loads.routes_from(action.unit).subset_starts[row]) + action.subset
        kind = COMPUTATIONS.index(action.kind)
        if isinstance(action.covers, SegmentRange):
            before = self._before_segments(action.unit, action.stage)[:, kind, :, row]
            seconds, waiting = _between(before[:, action.covers.first], before[:, action.covers.end]).tolist()
            return ComputeCost(seconds, waiting)
        found = self.of_unit(action.unit, of_subsets=action.subset >= 0)
        waits = self._waits(self._alike(action[1:4]), action.kind)[:, row] if action.subset < 0 else np.zeros(0)
        seconds, waiting = found[:, kind, action.stage, row].tolist()
        return ComputeCost(seconds, waiting, tuple(waits.tolist()))

    def of_pieces(self, work: StepWork, pieces: Integers) -> Floats:
        """[2, num_pieces] seconds, and the part of them that is spent waiting for collectives inside layers."""
        found = np.zeros((2, len(pieces)))
        stages, parts = work.computed_stages[pieces], work.pieces.parts[pieces]
        is_range = work.pieces.is_range[pieces]
        for number, unit in enumerate(work.pieces.units):
            is_own = (work.pieces.unit_of_stage[stages] == number) & ~is_range
            for of_subsets in (False, True):
                chosen = np.flatnonzero(is_own & ((parts >= 0) == of_subsets))
                if not len(chosen):
                    continue
                rows = work.pieces.numbers_in_unit[pieces[chosen]]
                if of_subsets:
                    rows = self.loads.routes_from(unit).subset_starts[rows] + parts[chosen]
                table = self.of_unit(unit, of_subsets=of_subsets)
                place = _ROW_OF_KIND[work.kinds[pieces[chosen]]], work.pieces.index_of_stage[stages[chosen]], rows
                found[:, chosen] = table.reshape(2, -1).take(np.ravel_multi_index(place, table.shape[1:]), axis=1)
        ranges = np.flatnonzero(is_range)
        found[:, ranges] = self._of_ranges(work, pieces[ranges])
        return found

    def _of_ranges(self, work: StepWork, pieces: Integers) -> Floats:
        """[2, num_pieces] seconds and waits of ranges of segments."""
        found, stages = np.zeros((2, len(pieces))), work.computed_stages[pieces]
        kinds, rows = _ROW_OF_KIND[work.kinds[pieces]], work.pieces.numbers_in_unit[pieces]
        firsts, ends = (bounds[pieces] for bounds in work.pieces.segment_bounds)
        units, indices = work.pieces.unit_of_stage[stages], work.pieces.index_of_stage[stages]
        for number, index in np.unique(np.stack((units, indices)), axis=1).T.tolist():
            chosen = np.flatnonzero((units == number) & (indices == index))
            before = self._before_segments(list(work.pieces.units)[number], index)
            of_kinds, of_rows = kinds[chosen], rows[chosen]
            found[:, chosen] = _between(before[:, of_kinds, firsts[chosen], of_rows], before[:, of_kinds, ends[chosen], of_rows])
        return found

    def waits(self, work: StepWork, pieces: Integers) -> tuple[Integers, Floats]:
        """Seconds of the waits of whole computations for tensor parallel ranks, as rows (starts, seconds)."""
        rows = work.pieces.numbers_in_unit[pieces]
        blocks, which = np.unique(work.blocks[pieces], return_inverse=True)
        sorts = [(self._alike(work.stages[each // len(KINDS)]), KINDS[each % len(KINDS)]) for each in blocks.tolist()]
        numbers = {sort: number for number, sort in enumerate(dict.fromkeys(sorts))}
        which = np.array([numbers[sort] for sort in sorts], np.int64)[which.ravel()]
        known = [self._waits(*sort) for sort in numbers]
        starts = row_starts(np.array(list(map(len, known)), np.int64)[which])
        found = np.zeros(int(starts[-1]))
        for number, waits in enumerate(known):
            chosen = np.flatnonzero(which == number)
            found[starts[chosen][:, None] + np.arange(len(waits))] = waits[:, rows[chosen]].T
        return starts, found

    def _alike(self, stage: StageKey) -> StageKey:
        """Return the stage that represents all stages that are like this one."""
        unit, replica, index = stage
        return next(key for key, where in self.stages.alike(unit) if where[index, replica])

    @memoized
    def _waits(self, stage: StageKey, kind: ActionKind) -> Floats:
        """[num_waits, num_microbatches of the unit] seconds of the waits of computations like a stage's."""
        count = self.loads.assignment.placed[stage[0]].num_microbatches
        rows = self.rows(stage[0])
        found = self._of_rows(rows, np.arange(count), lambda load: np.array(self.stages.waits(stage, kind, load)))
        return found if found.size else np.zeros((len(found), count))

    def of_both(self, unit: str) -> Floats:
        """[2, num_stages, num_microbatches] seconds of forward and backward together, and the waits inside layers among them."""
        placed, seconds = self.loads.assignment.placed[unit], self.of_unit(unit, of_subsets=False)
        has_backward = np.zeros((seconds.shape[2], placed.num_replicas), bool)
        for stage, where in self.stages.alike(unit):
            has_backward[where] = self.loads.shape.backward_need(*stage).has_backward
        has_backward = has_backward[:, placed.replica_of_microbatch]
        return np.where(has_backward, seconds[:, 0] + seconds[:, 1], seconds[:, 0])

    @memoized
    def of_unit(self, unit: str, *, of_subsets: bool) -> Floats:
        """[2, kinds, num_stages, num_rows] seconds of the `COMPUTATIONS`, and the waits for collectives inside layers among them.

        Rows are the unit's microbatches, or the sample subsets of all of them in the order of `StepShape.consumers`.
        """
        replicas, rows = self.loads.assignment.placed[unit].replica_of_microbatch, self.rows(unit, of_subsets=of_subsets)
        if of_subsets:
            replicas = np.repeat(replicas, np.diff(self.loads.routes_from(unit).subset_starts))
        found = None if of_subsets else self._computed_ahead.pop(unit, None)
        if found is None:
            found = self._in_every_stage(unit, replicas, rows)
        if self.stages.options.zero_stage >= 3 and not of_subsets:
            if self.stages.options.reduces_once:
                self._reduce_in_the_last(unit, found)
            found += self._waits_for_the_slowest(unit, found[0])
        if self.loads.shape.plan.units[unit].expert_parallel_size > 1:
            self._compute_together(unit, found, rows, of_subsets=of_subsets)
        return found

    def _in_every_stage(self, unit: str, replicas: Integers, rows: UnitLoad | Sequence[ComputedLoad]) -> Floats:
        """[2, kinds, num_stages, num_rows] seconds and waits as if no replica waited for another one; replicas: of the rows."""
        found = np.zeros((2, len(COMPUTATIONS), self.loads.shape.plan.units[unit].num_virtual_stages, len(replicas)))
        for stage, where in self.stages.alike(unit):
            chosen = np.flatnonzero(np.asarray(where.any(axis=0))[replicas])
            seconds = self._of_rows(rows, chosen, partial(self.stages.computations, stage))
            for index in np.flatnonzero(where.any(axis=1)).tolist():
                if where[index].all():
                    found[:, :, index] = seconds
                    continue
                is_here = where[index, replicas[chosen]]
                found[:, :, index, chosen[is_here]] = seconds[:, :, is_here]
        return found

    @staticmethod
    def compute_ahead(steps: "Sequence[ComputationSeconds]") -> None:
        """Compute what several steps under one plan will be asked for at once, which is faster where they are small."""
        for unit, sizes in steps[0].loads.shape.plan.units.items() if steps else ():
            if sizes.context_parallel_size > 1:
                continue
            placed = [each.loads.assignment.placed[unit] for each in steps]
            loads = zip(*(each.loads.of_microbatches(unit) for each in steps), strict=True)
            columns: list[Any] = list(map(np.concatenate, loads))
            replicas = np.concatenate([each.replica_of_microbatch for each in placed])
            found = steps[0]._in_every_stage(unit, replicas, UnitLoad(*columns))
            ends = np.cumsum([each.num_microbatches for each in placed])
            for each, own in zip(steps, np.split(found, ends[:-1], axis=-1), strict=True):
                each._computed_ahead[unit] = own

    @memoized
    def _before_segments(self, unit: str, stage: int) -> Floats:
        """[2, kinds, num_segments + 1, num_microbatches] seconds and waits before each segment; time of none is shared evenly."""
        rows, replicas = self.rows(unit), self.loads.assignment.placed[unit].replica_of_microbatch
        whole = self.of_unit(unit, of_subsets=False)[:, :, stage]
        of_keys = [(key, np.flatnonzero(where[stage][replicas])) for key, where in self.stages.alike(unit)]
        counts = {key: self.stages.stages.num_segments(key) for key, chosen in of_keys if len(chosen)}
        found = np.zeros((*whole.shape[:2], max(counts.values(), default=0), whole.shape[2]))
        for key, chosen in of_keys:
            if len(chosen):
                own = self._of_rows(rows, chosen, partial(self.stages.segments, key))
                found[:, :, : counts[key], chosen] = own + ((whole[..., chosen] - own.sum(axis=2)) / counts[key])[:, :, None]
        before = np.cumsum(found, axis=2)
        return np.concatenate((np.zeros_like(before[:, :, :1]), before), axis=2)

    def rows(self, unit: str, *, of_subsets: bool = False) -> UnitLoad | Sequence[ComputedLoad]:
        """Return loads as arrays, or one by one if context parallel ranks share their tokens."""
        if self.loads.shape.plan.units[unit].context_parallel_size > 1:
            return self.loads.computed(unit, of_subsets=of_subsets)
        return self.loads.of_subsets(unit) if of_subsets else self.loads.of_microbatches(unit)

    def _of_rows(
        self, rows: UnitLoad | Sequence[ComputedLoad], chosen: Integers, seconds: Callable[[ComputedLoad], Floats]
    ) -> Floats:
        """[..., num_chosen] seconds of some rows; seconds: a function of one load, or of one whose numbers are arrays."""
        if isinstance(rows, UnitLoad):
            columns: list[Any] = [np.asarray(column)[chosen] for column in rows]
            return seconds(ComputedLoad(UnitLoad(*columns)))
        loads = [rows[row] for row in chosen.tolist()]
        different = {load: seconds(load) for load in dict.fromkeys(loads)}
        return np.stack([different[load] for load in loads], axis=-1) if loads else np.zeros((2, len(COMPUTATIONS), 0))

    def _reduce_in_the_last(self, unit: str, found: Floats) -> None:
        """Prolong, in place, the backwards that end a step to the reduction of its gradients, if that takes longer."""
        placed = self.loads.assignment.placed[unit]
        is_last = placed.index_in_replica == placed.counts.max(initial=0) - 1
        for stage, where in self.stages.alike(unit):
            for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
                seconds, row = self.stages.gathering_seconds(kind, stage, reduces=True), COMPUTATIONS.index(kind)
                late = where[:, placed.replica_of_microbatch] & is_last & (found[0, row] > 0)
                found[:, row] += late * np.maximum(seconds - found[0, row], 0.0)

    def _waits_for_the_slowest(self, unit: str, seconds: Floats) -> Floats:
        """Return the seconds that each computation waits for the slowest replica's of the same number: they share weights."""
        placed = self.loads.assignment.placed[unit]
        slowest = np.zeros((*seconds.shape[:2], int(placed.counts.max(initial=0))))
        np.maximum.at(slowest.T, placed.index_in_replica, seconds.T)
        return slowest[:, :, placed.index_in_replica] - seconds

    def _compute_together(self, unit: str, found: Floats, rows: UnitLoad | Sequence[ComputedLoad], *, of_subsets: bool) -> None:
        """Prolong, in place, computations in stages with experts to those of the slowest of the replicas that share the experts.

        Each replica computes the same number of their tokens, since choices are assumed to be even, and they wait for each other
        in every layer, except in weight gradients. These waits count as waiting.
        """
        placed, plan = self.loads.assignment.placed[unit], self.loads.shape.plan.units[unit]
        keys = np.stack((placed.replica_of_microbatch // plan.expert_parallel_size, placed.index_in_replica))
        if of_subsets:
            starts = self.loads.routes_from(unit).subset_starts
            of_row = row_numbers(starts)
            keys = np.concatenate((keys[:, of_row], (np.arange(len(of_row)) - starts[of_row])[None]))
        groups = np.unique(keys, axis=1, return_inverse=True)[1].ravel()  # the same for rows that are computed together
        every, sizes = np.arange(len(groups)), np.bincount(groups)
        exchanging = np.array([kind is not ActionKind.WEIGHT_GRADIENT for kind in COMPUTATIONS])
        for index in range(plan.num_virtual_stages):
            if not self.stages.stages.exchanges_tokens((unit, 0, index)):
                continue
            products = self._of_rows(rows, every, partial(self.stages.expert_products, self._alike((unit, 0, index))))[0]
            evened = np.stack([np.bincount(groups, row, len(sizes)) for row in products]) / sizes
            found[0, :, index] += evened[:, groups] - products
            slowest = np.zeros_like(evened)
            np.maximum.at(slowest.T, groups, found[0, :, index].T)
            found[:, exchanging, index] += (slowest[:, groups] - found[0, :, index])[exchanging]

    @cached_property
    def _computed_ahead(self) -> dict[str, Floats]:
        return {}


def _between(first: Floats, end: Floats) -> Floats:
    """Return the difference of two sums of seconds and waits, [2, ...]; a norm may take next to nothing beside its wait."""
    found: Floats = np.maximum(end - first, 0.0)
    found[0] = np.maximum(found[0], found[1])
    return found
