"""Work inside computations: what may run there, the carrier of each, and the duration of carriers with it.

A carrier is a sequence of intervals of equal length in which it computes, and of waits between them. To all other work, a carrier
with the work inside it is one computation: it begins when its needs and those of the work inside are met, and all results are
available when it ends. So lane orders and the simulator only deal with whole computations. Collectives of the work in a wait
start when the wait is over, and run beside the next interval, which is prolonged if they take longer.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from multimodal.cost.pieces.tensor_parallel_waits import Wait, computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.stage_layers import StageLayers
from multimodal.values.action import Action, SegmentRange
from multimodal.values.arrays.rows import Bools, Floats, Integers, group_rows, row_numbers, row_starts
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.work.step_work import COMPUTE, StepWork

NO_CARRIER = -1


def carrier_slots(schedule: Schedule, slots: Integers) -> Integers:
    """Return the slot of the next computation in line after each slot, in its lane; `NO_CARRIER`: none."""
    is_carrier = (schedule.modes == SlotMode.IN_LINE) & (schedule.work.resources[schedule.pieces] == COMPUTE)
    carriers = np.append(np.flatnonzero(is_carrier), len(schedule.pieces))
    found = carriers[np.searchsorted(carriers, slots)]
    lanes = np.append(schedule.lane_of_slot, -1)
    return np.where(lanes[found] == lanes[slots], found, NO_CARRIER)


@dataclass(frozen=True, eq=False)
class InsideSlots:
    """The slots of a schedule that are inside computations; columns of one length."""

    schedule: Schedule
    slots: Integers
    """Ascending."""
    carrier_slots: Integers
    """The slot of each one's carrier, the next computation in line; -1: none."""
    pieces: Integers
    """The work inside."""
    carriers: Integers
    """The piece of work that carries each; the piece itself if there is no carrier, so that it never runs."""
    waits: Integers
    """The index of the carrier's wait in which each runs."""
    lanes: Integers
    """The lane of each slot."""

    @classmethod
    def of(cls, schedule: Schedule) -> "InsideSlots":
        """Find the slots. O(slots)."""
        slots = np.flatnonzero(schedule.modes == SlotMode.INSIDE)
        of_carriers, pieces = carrier_slots(schedule, slots), schedule.pieces[slots]
        carriers = np.where(of_carriers < 0, pieces, schedule.pieces[of_carriers])
        return cls(schedule, slots, of_carriers, pieces, carriers, schedule.waits[slots], schedule.lane_of_slot[slots])

    @cached_property
    def hosts(self) -> Integers:
        """[num_pieces] the computation that a piece is part of when it runs: its carrier, or itself."""
        hosts = np.arange(self.schedule.work.num_pieces(lowered=self.schedule.lowered))
        hosts[self.pieces] = self.carriers
        return hosts

    def joined_needs(self) -> tuple[Integers, Integers]:
        """Return the pieces that each piece needs (starts, pieces); a carrier also has the needs of the work inside it."""
        starts, needs = self.schedule.work.needs_in(lowered=self.schedule.lowered)
        owners, needed = self.hosts[row_numbers(starts)], self.hosts[needs]
        is_other = owners != needed
        return group_rows(owners[is_other], needed[is_other], len(starts) - 1)


@dataclass(frozen=True, eq=False)
class CarrierTimes:
    """The seconds by which work inside carriers prolongs them, and the times at which that work runs."""

    carriers: Integers
    """[num_carriers] pieces of work."""
    added: Floats
    """[num_carriers] seconds by which the work inside exceeds the waits that it fills, and its collectives the intervals."""
    late: Floats
    """[num_carriers] the part of `added` that its collectives cause."""
    offsets: Floats
    """[num inside slots] seconds from the carrier's start to that of the work inside."""
    durations: Floats
    """[num inside slots] seconds."""


def time_carriers(
    inside: InsideSlots, *, carriers: Integers, seconds: Floats, waits: tuple[Integers, Floats], durations: Floats, behind: Floats
) -> CarrierTimes:
    """Return the times of carriers: they compute in equal intervals, and a wait lasts as long as the longest work inside it.

    carriers: pieces, ascending, each once; seconds: of each carrier alone, waits included; waits: seconds of its waits, as rows
    (missing ones take no time); durations, behind: seconds of the work inside, slot by slot, and of the collective behind it.
    O(slots log slots + waits).
    """
    owners = np.searchsorted(carriers, inside.carriers)
    num_used = np.zeros(len(carriers), np.int64)
    np.maximum.at(num_used, owners, inside.waits + 1)
    starts = row_starts(np.maximum(np.diff(waits[0]), num_used))
    alone = np.zeros(int(starts[-1]))
    alone[np.arange(len(waits[1])) + np.repeat(starts[:-1] - waits[0][:-1], np.diff(waits[0]))] = waits[1]
    filled = starts[owners] + inside.waits
    keys, groups = np.unique(filled * inside.schedule.num_lanes + inside.lanes, return_inverse=True)
    groups, filled_waits = groups.ravel(), keys // inside.schedule.num_lanes
    intervals = (seconds - _row_sums(starts, alone)) / (np.diff(starts) + 1)
    lengths, late = alone.copy(), np.zeros_like(alone)
    np.maximum.at(lengths, filled_waits, np.bincount(groups, durations, len(keys)))
    np.maximum.at(late, filled_waits, np.bincount(groups, behind, len(keys)))
    late = np.maximum(0.0, late - np.repeat(intervals, np.diff(starts)))
    before = np.cumsum(np.append(0.0, lengths + late))
    offsets = before[filled] - before[starts[owners]] + (inside.waits + 1) * intervals[owners]
    added = _row_sums(starts, lengths - alone + late)
    return CarrierTimes(carriers, added, _row_sums(starts, late), offsets + _before_in_group(groups, durations), durations)


def _row_sums(starts: Integers, values: Floats) -> Floats:
    return np.bincount(row_numbers(starts), values, len(starts) - 1).astype(np.float64)


def _before_in_group(groups: Integers, values: Floats) -> Floats:
    """Return the sum of the values before each value in its group."""
    order = np.argsort(groups, kind="stable")
    before = np.cumsum(values[order]) - values[order]
    first = np.searchsorted(groups[order], groups[order])
    found = np.empty(len(values))
    found[order] = before - before[first]
    return found


MOST_COLLECTIVES = RunOptions(transformer_impl="local", recompute="full", sequence_parallel=True)
"""Options of a run whose layers have every possible collective."""


class PieceCollectives(NamedTuple):
    """Facts of pieces; columns of one length."""

    fits_inside: Bools
    """True if the piece itself waits for no collective."""
    ends_with_one: Bools
    """True if a collective follows the piece, for which the pieces that continue it wait."""

    @classmethod
    def of(cls, work: StepWork, pieces: Integers, *, options: RunOptions) -> "PieceCollectives":
        """Find the collectives of pieces. O(pieces log pieces)."""
        plans = [work.plan.units[name] for name in work.pieces.units]
        sizes = [max(plan.tensor_sizes) * plan.context_parallel_size for plan in plans]
        fits, ends = np.ones(len(pieces), bool), np.zeros(len(pieces), bool)
        stages, (firsts, lasts) = work.computed_stages[pieces], work.pieces.segment_bounds
        units, indices = work.pieces.unit_of_stage[stages], work.pieces.index_of_stage[stages]
        shared = np.flatnonzero(np.array(sizes)[units] > 1)
        replicas = np.where(np.array([plan.is_unlike for plan in plans])[units], work.replicas[pieces], 0)  # others are alike
        columns = (units, indices, replicas, work.kinds[pieces].astype(np.int64), firsts[pieces], lasts[pieces])
        counts = [each[shared] + 1 for each in columns]  # columns are -1 or more
        keys = np.ravel_multi_index(counts, [1 + each.max(initial=0) for each in counts])
        _, examples, which = np.unique(keys, return_index=True, return_inverse=True)
        layers = StageLayers(work.graph, work.plan, vocab_size=0)
        for number, example in enumerate(examples.tolist()):
            action = work.action(int(pieces[shared[example]]))
            alike = shared[which.ravel() == number]
            waits = own_waits(action, layers, options=options)
            ends[alike] = bool(waits) and waits[-1].is_at_end
            fits[alike] = work.plan.units[action.unit].context_parallel_size == 1 and all(wait.is_at_end for wait in waits)
        return cls(fits, ends)


def own_waits(action: Action, layers: StageLayers, *, options: RunOptions) -> tuple[Wait, ...]:
    """Return the waits of a computation, or of its range of segments, for its own tensor parallel ranks."""
    if layers.tensor_size(action[1:4]) == 1:
        return ()
    covers = action.covers if isinstance(action.covers, SegmentRange) else None
    unit = layers.graph.unit(action.unit)
    return computation_waits(action.kind, layers.in_order(action[1:4]), options=options, covers=covers, unit=unit)
