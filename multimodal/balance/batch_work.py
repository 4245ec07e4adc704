"""The work of a global batch: FLOPs or declared costs of each sample and item for each unit, and how evenly they are spread."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import NamedTuple

from multimodal.balance.balance_options import BalanceOptions, validate_inputs
from multimodal.balance.unit_cost import UnitCost
from multimodal.cost.flops import UnitFlops, unit_flops
from multimodal.cost.unit_load import UnitLoad, item_load, sample_load
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, index_by_sample

_AMOUNT_PER_TOKEN = 1024
"""Work is counted in integers, so that sums are exact and every rank decides alike."""
_MEAN_SAMPLE_AMOUNT = 1 << 16
"""The amount of a sample of mean work in all units together."""


@dataclass(frozen=True)
class BatchWork:
    """The work of one global batch."""

    graph: ModelGraph
    lengths: Sequence[SampleLengths]
    options: BalanceOptions

    @cached_property
    def lengths_by_sample(self) -> Mapping[int, SampleLengths]:
        """sample id -> lengths, in the order of the ids."""
        return index_by_sample(sorted(self.lengths, key=lambda sample: sample.sample_id))

    @cached_property
    def samples(self) -> list[Atom]:
        """All samples of the batch, in the order of their ids."""
        return [Atom(sample_id) for sample_id in self.lengths_by_sample]

    @cached_property
    def _flops(self) -> Mapping[str, UnitFlops]:
        vocab_size = self.options.vocab_size
        return {name: unit_flops(self.graph, name, vocab_size=vocab_size) for name in self.graph.unit_names}

    def cost(self, unit: str) -> UnitCost:
        """Return the unit's cost as a function of what `amounts` returns: as declared, else linear."""
        return self.options.unit_costs.get(unit, UnitCost())

    def amounts(self, unit: str, groups: Sequence[Sequence[Atom]]) -> list[int]:
        """Return the argument of `cost` for each group of atoms that stay together.

        Tokens where the unit's cost is declared. Else FLOPs of forward and backward, in 1/1024 of one token's linear work:
        these add up over packed sequences of any lengths, attention included.
        """
        if unit in self.options.unit_costs:
            return [sum(self.load(unit, atom).num_tokens for atom in group) for group in groups]
        flops = self._flops[unit]
        of_token = flops.of(UnitLoad(num_tokens=1)) or flops.of(UnitLoad(num_squared=1)) or 1.0
        scale = _AMOUNT_PER_TOKEN / of_token
        return [round(scale * sum(flops.of(self.load(unit, atom)) for atom in group)) for group in groups]

    def whole_sample_amounts(self) -> list[int]:
        """Return `whole_sample_flops` of all samples as integers, so that sums are exact."""
        totals = [self.whole_sample_flops(sample) for sample in self.samples]
        mean = sum(totals) / len(totals) if any(totals) else 1.0
        return [round(_MEAN_SAMPLE_AMOUNT * total / mean) for total in totals]

    def whole_sample_flops(self, sample: Atom) -> float:
        """Return the FLOPs of a sample's forward and backward in all units together."""
        return sum(sum(self.flops(unit, atoms)) for unit, atoms in self.atoms_by_unit((sample,)).items())

    def atoms_by_unit(self, samples: Microbatch) -> dict[str, Microbatch]:
        """Return unit -> the atoms of these samples that it processes: items for encoders, samples for the others."""
        encoders = {
            unit.name: list_items(samples, unit=unit.name, lengths_by_sample=self.lengths_by_sample)
            for unit in self.graph.encoders
        }
        return {**encoders, self.graph.backbone.name: samples, **{unit.name: samples for unit in self.graph.generators}}

    def microbatch_work(self, unit: str, atoms: Sequence[Atom]) -> float:
        """Return the work of one microbatch of a unit: its declared cost in tokens, else FLOPs of forward and backward."""
        if unit in self.options.unit_costs:
            return self.cost(unit).batch_cost([self.load(unit, atom).num_tokens for atom in atoms])
        return sum(self.flops(unit, atoms))

    def flops(self, unit: str, atoms: Sequence[Atom]) -> tuple[float, float]:
        """Return the FLOPs of these atoms' forward and of their backward."""
        loads, flops = [self.load(unit, atom) for atom in atoms], self._flops[unit]
        return sum(map(flops.forward.of, loads)), sum(map(flops.backward.of, loads))

    def load(self, unit: str, atom: Atom) -> UnitLoad:
        """Return the tokens of one atom as the unit processes them."""
        sample = self.lengths_by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)


def read_batch(lengths: Sequence[SampleLengths], *, graph: ModelGraph, options: BalanceOptions) -> BatchWork:
    """Return the work of a global batch once it and the options are checked; raises AssignmentError as `validate_inputs` does."""
    validate_inputs(lengths, graph=graph, options=options)
    return BatchWork(graph, lengths, options)


def list_items(samples: Iterable[Atom], *, unit: str, lengths_by_sample: Mapping[int, SampleLengths]) -> Microbatch:
    """List the items of `samples` that an encoder processes, sample by sample, in document order."""
    return tuple(
        Atom(sample.sample_id, index)
        for sample in samples
        for index, item in enumerate(lengths_by_sample[sample.sample_id].items)
        if item.unit == unit
    )


class Imbalance(NamedTuple):
    """The imbalance of one unit's work in one global batch; 1.0 is perfect balance."""

    replica: float
    """Largest over mean cost of the replicas: how long the others wait for the slowest."""
    microbatch: float
    """Largest over mean cost of all microbatches."""
    microbatch_std: float
    """Standard deviation of the microbatches' costs, as a fraction of their mean."""
    replica_of_longest: float = 1.0
    """What `replica` is at least, because the longest item cannot be cut: its cost over the mean, or 1. Of the LLM and of
    generators the longest sample; also of an encoder, where no sample is spread over several microbatches."""
    microbatch_of_longest: float = 1.0
    """The same of `microbatch`."""


def unit_imbalance(assignment: Assignment, work: BatchWork, *, unit: str) -> Imbalance:
    """Measure how unevenly an assignment spreads one unit's work; a unit without work is balanced. O(atoms)."""
    cost = work.cost(unit)
    amounts = [
        [work.amounts(unit, [(atom,) for atom in microbatch]) for microbatch in replica] for replica in assignment.units[unit]
    ]
    microbatches = [[cost.batch_cost(of_atoms) for of_atoms in replica] for replica in amounts]
    replicas, flat = [sum(replica) for replica in microbatches], [each for replica in microbatches for each in replica]
    mean = fmean(flat) if flat else 0.0
    if not mean:
        return Imbalance(_largest_over_mean(replicas), 1.0, 0.0)
    longest = max(map(cost.batch_cost, _kept_together(assignment, amounts, unit=unit)))
    return Imbalance(
        _largest_over_mean(replicas),
        _largest_over_mean(flat),
        pstdev(flat) / mean,
        max(1.0, longest / fmean(replicas)),
        max(1.0, longest / mean),
    )


def _kept_together(assignment: Assignment, amounts: Sequence[Sequence[Sequence[int]]], *, unit: str) -> list[list[int]]:
    """Return the amounts of each sample's atoms if every sample is in one microbatch, else those of each atom."""
    by_place: dict[tuple[int, int, int], list[int]] = {}
    for replica, (microbatches, of_replica) in enumerate(zip(assignment.units[unit], amounts, strict=True)):
        for index, (atoms, of_atoms) in enumerate(zip(microbatches, of_replica, strict=True)):
            for atom, amount in zip(atoms, of_atoms, strict=True):
                by_place.setdefault((atom.sample_id, replica, index), []).append(amount)
    if len({sample_id for sample_id, _, _ in by_place}) == len(by_place):
        return list(by_place.values())
    return [[amount] for of_atoms in by_place.values() for amount in of_atoms]


def _largest_over_mean(costs: Sequence[float]) -> float:
    total = sum(costs)
    return max(costs) * len(costs) / total if total else 1.0
