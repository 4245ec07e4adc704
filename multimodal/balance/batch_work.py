"""How much work each sample and each item of a global batch is for each unit: what balancers make equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.unit_cost import UnitCost
from multimodal.cost.layer_flops import UnitLoad, item_load, layer_forward_flops, sample_load
from multimodal.cost.layer_seconds import passes_gradient
from multimodal.values.assignment import Atom
from multimodal.values.backward_need import layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, index_by_sample

_UNITS_PER_TOKEN = 1024
"""Work is counted in integers, so that sums are exact and every rank decides alike."""


class UnitFlops(NamedTuple):
    """FLOPs of a unit's forward and backward; linear in a load's three numbers."""

    per_token: float
    per_squared_token: float
    per_output: float

    def of(self, load: UnitLoad) -> float:
        """FLOPs of a load."""
        return self.per_token * load.num_tokens + self.per_squared_token * load.num_squared + self.per_output * load.num_outputs


def unit_flops(graph: ModelGraph, unit_name: str, *, vocab_size: int) -> UnitFlops:
    """Count a unit's forward and backward; frozen layers compute only the gradients that something upstream needs."""
    unit = graph.unit(unit_name)
    totals = [0.0, 0.0, 0.0]
    for index, kind in enumerate(unit.layers):
        need = layers_backward_need(graph, unit_name, range(index, index + 1))
        for column, load in enumerate((UnitLoad(num_tokens=1), UnitLoad(num_squared=1), UnitLoad(num_outputs=1))):
            linear, attention = layer_forward_flops(graph, unit, kind, load, vocab_size=vocab_size)
            totals[column] += linear * (1 + passes_gradient(kind, need) + need.trains_weights) + attention * (
                3 if need.has_backward else 1
            )
    return UnitFlops(*totals)


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
    def _flops(self) -> Mapping[str, UnitFlops]:
        vocab_size = self.options.vocab_size
        return {name: unit_flops(self.graph, name, vocab_size=vocab_size) for name in self.graph.unit_names}

    def cost(self, unit: str) -> UnitCost:
        """How the unit's cost grows with what `amounts` returns: as declared, else linearly."""
        return self.options.unit_costs.get(unit, UnitCost())

    def amounts(self, unit: str, groups: Sequence[Sequence[Atom]]) -> list[int]:
        """What `cost` is a function of, per group of atoms that stay together.

        Tokens where the unit's cost is declared. Else FLOPs of forward and backward, in 1/1024 of one token's linear work:
        these add up over packed sequences of any lengths, attention included.
        """
        if unit in self.options.unit_costs:
            return [sum(self.load(unit, atom).num_tokens for atom in group) for group in groups]
        flops = self._flops[unit]
        scale = _UNITS_PER_TOKEN / (flops.per_token or flops.per_squared_token or 1.0)
        return [round(scale * sum(flops.of(self.load(unit, atom)) for atom in group)) for group in groups]

    def flops(self, unit: str, atoms: Sequence[Atom]) -> float:
        """FLOPs of forward and backward of these atoms."""
        return sum(self._flops[unit].of(self.load(unit, atom)) for atom in atoms)

    def load(self, unit: str, atom: Atom) -> UnitLoad:
        """What one atom asks of a unit."""
        sample = self.lengths_by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)
