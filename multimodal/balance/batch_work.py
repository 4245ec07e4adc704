"""The work of a global batch: FLOPs or declared costs of each sample and item in each unit, and their imbalance."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from statistics import fmean
from typing import NamedTuple

import numpy as np

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.length_cost import LengthCost
from multimodal.cost.flops import UnitFlops, unit_flops
from multimodal.cost.memoize import memoized
from multimodal.cost.unit_load import AtomLoads, UnitLoad, atom_loads, atom_numbers
from multimodal.values.arrays.rows import Floats, Integers, group_rows, row_starts
from multimodal.values.assignment import Assignment, Atom, Microbatch, PlacedAtoms
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import LengthArrays, LengthBatch, SampleLengths

_AMOUNT_PER_TOKEN = 1024
"""Work is counted in integers, so that sums are exact and all ranks decide alike."""
_MEAN_SAMPLE_AMOUNT = 1 << 16
"""The integer amount of a sample of mean work in all units together."""


@dataclass(frozen=True)
class BatchWork:
    """The work of one global batch. Samples are numbered in the order of their ids, an encoder's items sample by sample."""

    graph: ModelGraph
    lengths: Sequence[SampleLengths]
    options: BalanceOptions

    @cached_property
    def arrays(self) -> LengthArrays:
        """All samples, in the order of their ids."""
        return LengthBatch.of(self.lengths).by_id

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self.arrays)

    def count_microbatches(self, num_replicas: int) -> int:
        """Return the number of microbatches of each LLM replica: as given, or as it follows from their size."""
        options = self.options
        if options.num_microbatches is not None:
            return options.num_microbatches
        if options.tokens_per_microbatch is not None:
            return max(1, ceil(int(self.arrays.num_tokens.sum()) / (num_replicas * options.tokens_per_microbatch)))
        return ceil(self.num_samples / (num_replicas * options.micro_batch_size))

    @cached_property
    def _flops(self) -> Mapping[str, UnitFlops]:
        vocab_size = self.options.vocab_size
        return {name: unit_flops(self.graph, name, vocab_size=vocab_size) for name in self.graph.unit_names}

    def cost(self, unit: str) -> LengthCost:
        """Return the unit's cost as a function of the result of `amounts`: as declared, else linear."""
        return self.options.unit_costs.get(unit, LengthCost())

    @memoized
    def of_unit(self, unit: str) -> AtomLoads:
        """Return the tokens of each of a unit's atoms. O(items)."""
        return atom_loads(self.graph.unit(unit), self.arrays)

    def item_rows(self, unit: str) -> tuple[Integers, Integers]:
        """Return the items of each sample in an encoder, as rows: starts, numbers of items."""
        samples = self.of_unit(unit).samples
        return row_starts(np.bincount(samples, minlength=self.num_samples)), np.arange(len(samples))

    def amounts(self, unit: str, groups: Integers | None = None) -> Integers:
        """Return the argument of `cost` for each of a unit's atoms, or for each group of atoms that stay together.

        These are tokens if the unit's cost is declared. Else they are FLOPs of forward and backward, in 1/1024 of one token's
        linear work: these add up over packed sequences of any lengths, attention included. groups: [num_atoms].
        """
        work = self.of_unit(unit)
        if unit in self.options.unit_costs:
            return work.num_tokens if groups is None else sum_by(groups, work.num_tokens)
        flops = self._flops[unit]
        of_token = flops.of(UnitLoad(num_tokens=1)) or flops.of(UnitLoad(num_squared=1)) or 1.0
        amounts = flops.forward.of_each(work) + flops.backward.of_each(work)
        return _rounded(_AMOUNT_PER_TOKEN / of_token * (amounts if groups is None else sum_floats_by(groups, amounts)))

    def sample_amounts(self, unit: str) -> Integers:
        """Return `amounts` of each sample's items in an encoder."""
        found = self.amounts(unit, self.of_unit(unit).samples)
        return np.concatenate((found, np.zeros(self.num_samples - len(found), np.int64)))

    def whole_sample_amounts(self) -> Integers:
        """Return `whole_sample_flops` as integers, so that sums are exact."""
        totals = self.whole_sample_flops()
        mean = sum(totals.tolist()) / len(totals) if totals.any() else 1.0
        return _rounded(_MEAN_SAMPLE_AMOUNT * totals / mean)

    def whole_sample_flops(self) -> Floats:
        """[num_samples] FLOPs of each sample's forward and backward in all units together."""
        total = np.zeros(self.num_samples)
        for unit in (*self.graph.encoders, self.graph.backbone, *self.graph.generators):
            forward, backward = self.flops(unit.name)
            samples = self.of_unit(unit.name).samples
            total += sum_floats_by(samples, forward, len(total)) + sum_floats_by(samples, backward, len(total))
        return total

    def flops(self, unit: str) -> tuple[Floats, Floats]:
        """Return the FLOPs of each atom's forward and of its backward."""
        work, flops = self.of_unit(unit), self._flops[unit]
        return flops.forward.of_each(work), flops.backward.of_each(work)

    def numbers(self, unit: str, placed: PlacedAtoms) -> Integers:
        """Return the numbers of placed atoms among the unit's."""
        return atom_numbers(self.graph.unit(unit), self.arrays, placed.sample_ids, placed.item_indices)

    def microbatch_work(self, unit: str, placed: PlacedAtoms) -> Floats:
        """[num_microbatches] the work of each: its declared cost in tokens, else FLOPs of forward and backward."""
        atoms = self.numbers(unit, placed)
        if unit in self.options.unit_costs:
            return self.cost(unit).row_costs(placed.atom_starts, self.of_unit(unit).num_tokens[atoms]).astype(np.float64)
        sums = (sum_floats_by(placed.microbatch_of_atom, each[atoms], placed.num_microbatches) for each in self.flops(unit))
        return next(sums) + next(sums)


def sum_by(owners: Integers, values: Integers, num_owners: int = 0) -> Integers:
    """Add up whole numbers by their owners."""
    sums = np.zeros(max(num_owners, int(owners.max(initial=-1)) + 1), np.int64)
    np.add.at(sums, owners, values)
    return sums


def sum_floats_by(owners: Integers, values: Floats | Integers, num_owners: int = 0) -> Floats:
    """Add up by owners, one after the other in the given order: the same on every processor."""
    return np.bincount(owners, values, num_owners).astype(np.float64, copy=False)


def _rounded(values: Floats) -> Integers:
    """Round to whole numbers, halves to the even one."""
    rounded = np.rint(values)
    if rounded.max(initial=0.0) < 2.0**62:
        return rounded.astype(np.int64)
    return np.array(list(map(int, rounded.tolist())), object)  # the caller compares them and raises the error


def list_items(samples: Iterable[Atom], *, unit: str, lengths_by_sample: Mapping[int, SampleLengths]) -> Microbatch:
    """List the items of `samples` that an encoder processes, sample by sample, in document order."""
    return tuple(
        Atom(sample.sample_id, index)
        for sample in samples
        for index, item in enumerate(lengths_by_sample[sample.sample_id].items)
        if unit in item.units
    )


class Imbalance(NamedTuple):
    """The imbalance of one unit's work in one global batch; 1.0 is perfect balance."""

    replica: float
    """Largest over mean cost of the replicas, the factor by which the others wait for the slowest."""
    microbatch: float
    """Largest over mean cost of all microbatches."""
    microbatch_std: float
    """Standard deviation of the microbatches' costs, as a fraction of their mean."""
    replica_of_longest: float = 1.0
    """The lower bound of `replica` that follows from the longest item, which cannot be cut: its cost over the mean, or 1. For the
    LLM and generators it follows from the longest sample; also for an encoder, if every sample is in one microbatch."""
    microbatch_of_longest: float = 1.0
    """The same lower bound for `microbatch`."""


def unit_imbalance(assignment: Assignment, work: BatchWork, *, unit: str) -> Imbalance:
    """Measure how unevenly an assignment spreads one unit's work; a unit without work is balanced. O(atoms)."""
    cost, placed = work.cost(unit), assignment.placed[unit]
    amounts = work.amounts(unit)[work.numbers(unit, placed)]
    of_microbatches = cost.row_costs(placed.atom_starts, amounts)
    replicas = sum_floats_by(placed.replica_of_microbatch, of_microbatches, placed.num_replicas).tolist()
    microbatches = of_microbatches.tolist()
    mean = fmean(microbatches) if microbatches else 0.0
    if not mean:
        return Imbalance(_largest_over_mean(replicas), 1.0, 0.0)
    # What is kept together: each sample's atoms if every sample is in one microbatch, else each atom.
    _, samples = np.unique(placed.sample_ids, return_inverse=True)
    places, num_samples = np.unique(samples * placed.num_microbatches + placed.microbatch_of_atom), int(samples.max()) + 1
    is_kept = len(places) == num_samples
    rows = group_rows(samples, amounts, num_samples) if is_kept else (np.arange(len(amounts) + 1), amounts)
    longest = float(cost.row_costs(*rows).max())
    spread, bounds = float(np.std(of_microbatches)) / mean, (max(1.0, longest / fmean(replicas)), max(1.0, longest / mean))
    return Imbalance(_largest_over_mean(replicas), _largest_over_mean(microbatches), spread, *bounds)


def _largest_over_mean(costs: Sequence[float]) -> float:
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0


def fit_tokens(work: BatchWork, balance: Callable[[BatchWork], Assignment]) -> Assignment:
    """Return an assignment whose microbatches of several samples have at most `tokens_per_microbatch`, if that is set.

    Balancers equalise work, not tokens, so the number that suffices on average may be too small. It grows by an eighth, or one,
    at a time, up to a replica's number of samples.
    """
    assignment, most = balance(work), work.options.tokens_per_microbatch
    if most is None:
        return assignment
    arrays, count = work.arrays, 0
    while True:
        placed = assignment.placed[work.graph.backbone.name]
        samples = np.searchsorted(arrays.sample_ids, placed.sample_ids)
        tokens = sum_by(placed.microbatch_of_atom, arrays.num_tokens[samples], placed.num_microbatches)
        too_full = (tokens > most) & (np.diff(placed.atom_starts) > 1)
        count = max(count, int(placed.counts.max(initial=1)))
        if not too_full.any() or count >= len(arrays):
            return assignment
        count += max(1, count // 8)
        assignment = balance(replace(work, options=replace(work.options, num_microbatches=count)))
