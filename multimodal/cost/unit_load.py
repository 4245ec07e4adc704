"""Loads: what samples and items ask of a unit, as far as its cost depends on it."""

from collections.abc import Iterable
from typing import NamedTuple

from multimodal.values.model_graph import Role, Unit
from multimodal.values.sample_lengths import SampleLengths


class UnitLoad(NamedTuple):
    """The work of a unit at one time, in the numbers that its cost depends on; adds up over atoms."""

    num_tokens: int = 0
    """Tokens inside the unit's transformer."""
    num_squared: int = 0
    """Sum of squares of the lengths of its sequences."""
    num_outputs: int = 0
    """Tokens that leave: of the projector for an encoder, target tokens for the LLM, all tokens for a generator."""
    num_sequences: int = 0
    """Sequences that attend apart: samples, or items of an encoder or a generator. No FLOPs, but some calls for each."""


class CutLoad(NamedTuple):
    """The part of a load that attends to the keys and values of other context parallel ranks."""

    attending: UnitLoad
    num_gathered: int
    """Rows of keys that are gathered, with those that pad every rank's to as many as the fullest one's."""


class ComputedLoad(NamedTuple):
    """The load of a computation: the microbatch's, or the busiest context parallel rank's part times their number."""

    all: UnitLoad
    cut: CutLoad | None = None
    """None: all of it, where context parallel ranks share it."""


def item_load(num_tokens: int, num_output_tokens: int) -> UnitLoad:
    """Return the load of one sequence inside a unit."""
    return UnitLoad(num_tokens, num_tokens * num_tokens, num_output_tokens, 1 if num_tokens else 0)


def sample_load(unit: Unit, sample: SampleLengths) -> UnitLoad:
    """Return what one sample with all its items asks of a unit."""
    if unit.role is Role.BACKBONE:
        return item_load(sample.num_tokens, sample.num_target_tokens)
    items = (item for item in sample.items if item.unit == unit.name)
    is_generator = unit.role is Role.GENERATOR
    return add_loads(item_load(item.num_tokens, item.num_tokens if is_generator else item.num_output_tokens) for item in items)


def add_loads(loads: Iterable[UnitLoad]) -> UnitLoad:
    """Sum up; nothing is the empty load."""
    columns = zip(*loads, strict=True)
    return UnitLoad(*map(sum, columns))


def of_all_ranks(load: UnitLoad, num_ranks: int) -> UnitLoad:
    """Return the load that gives every rank as much as `load` when they share it; all see the same sequences."""
    return UnitLoad(num_ranks * load.num_tokens, num_ranks * load.num_squared, num_ranks * load.num_outputs, load.num_sequences)
