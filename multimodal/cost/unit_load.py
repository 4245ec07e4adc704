"""Loads: the numbers of samples and items that the cost of a unit depends on."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from multimodal.values.arrays.rows import Floats, Integers, row_starts, row_sums
from multimodal.values.model_graph import Role, Unit
from multimodal.values.sample_lengths import ItemLengths, LengthArrays, SampleLengths


class UnitLoad(NamedTuple):
    """The work of a unit on one microbatch, as the numbers that its cost depends on; adds up over atoms."""

    num_tokens: int = 0
    """Tokens inside the unit's transformer."""
    num_squared: int = 0
    """Sum of squares of the lengths of its sequences."""
    num_outputs: int = 0
    """Tokens that leave: from an encoder's projector, target tokens of the LLM, or those that a generator makes."""
    num_sequences: int = 0
    """Sequences that attend separately: samples, or items of an encoder or a generator. They add calls, but no FLOPs."""


class CutLoad(NamedTuple):
    """The part of a load that attends to the keys and values of other context parallel ranks."""

    attending: UnitLoad
    num_gathered: int
    """Gathered rows of keys, including the rows that pad every rank's to the number of the fullest rank's."""


class ComputedLoad(NamedTuple):
    """The load of a computation: the microbatch's, or that of the busiest context parallel rank times the number of ranks."""

    all: UnitLoad
    cut: CutLoad | None = None
    """None: all of the load, if context parallel ranks share it."""


def item_load(num_tokens: int, num_output_tokens: int) -> UnitLoad:
    """Return the load of one sequence inside a unit."""
    return UnitLoad(num_tokens, num_tokens * num_tokens, num_output_tokens, 1 if num_tokens else 0)


def sample_load(unit: Unit, sample: SampleLengths) -> UnitLoad:
    """Return the load of one sample with all its items on a unit."""
    if unit.role is Role.BACKBONE:
        return item_load(sample.num_tokens, sample.num_target_tokens)
    return add_loads(item_loads(unit, (item.inside(unit.name) for item in sample.items if unit.name in item.units)))


def item_loads(unit: Unit, items: Iterable[ItemLengths]) -> list[UnitLoad]:
    """Return the load of each item; all that a generator makes leaves it, without the tokens from encoders."""
    makes = unit.role is Role.GENERATOR
    return [item_load(item.num_tokens, item.num_output_tokens or makes * item.num_tokens) for item in items]


class AtomLoads(NamedTuple):
    """The load of each atom of a global batch on a unit: an encoder's items, sample by sample, or all samples."""

    samples: Integers
    """[num_atoms] the index of each atom's sample in the batch."""
    num_tokens: Integers
    num_squared: Floats
    """Rounded once if beyond 2^53."""
    num_outputs: Integers
    num_sequences: Integers


def atom_loads(unit: Unit, lengths: LengthArrays) -> AtomLoads:
    """Return the loads of all atoms of a unit: `item_load` of an encoder's items, else `sample_load`. O(items)."""
    every = np.arange(len(lengths))
    if unit.role is Role.BACKBONE:
        return _of_sequences(every, lengths.num_tokens, lengths.num_target_tokens)
    items = lengths.items_of(unit.name)
    samples, tokens = lengths.sample_of_item[items], lengths.num_item_tokens[items]
    if unit.role is Role.ENCODER:
        return _of_sequences(samples, tokens, lengths.num_output_tokens[items])
    starts = row_starts(np.bincount(samples, minlength=len(lengths)))
    made = lengths.num_output_tokens[items]
    columns = (tokens, tokens * tokens, np.where(made > 0, made, tokens), (tokens > 0).astype(np.int64))
    tokens, squared, made, sequences = (row_sums(starts, each) for each in columns)
    return AtomLoads(every, tokens, squared.astype(np.float64), made, sequences)


def _of_sequences(samples: Integers, tokens: Integers, outputs: Integers) -> AtomLoads:
    return AtomLoads(samples, tokens, np.square(tokens.astype(np.float64)), outputs, (tokens > 0).astype(np.int64))


def atom_numbers(unit: Unit, lengths: LengthArrays, sample_ids: Integers, item_indices: Integers) -> Integers:
    """Return the numbers of atoms among all atoms of the unit. lengths: in the order of the ids. O(atoms log)."""
    samples = np.searchsorted(lengths.sample_ids, sample_ids)
    if unit.role is not Role.ENCODER:
        return samples
    items, stride = lengths.items_of(unit.name), lengths.index_of_item.max(initial=0) + 1
    keys = lengths.sample_of_item[items] * stride + lengths.index_of_item[items]
    return np.searchsorted(keys, samples * stride + item_indices)


def add_loads(loads: Iterable[UnitLoad]) -> UnitLoad:
    """Sum up loads; the sum of none is the empty load."""
    return UnitLoad(*map(sum, zip(*loads, strict=True)))


def of_all_ranks(load: UnitLoad, num_ranks: int) -> UnitLoad:
    """Return the load of which `num_ranks` ranks each have `load` as their share; all have the same sequences."""
    return UnitLoad(num_ranks * load.num_tokens, num_ranks * load.num_squared, num_ranks * load.num_outputs, load.num_sequences)
