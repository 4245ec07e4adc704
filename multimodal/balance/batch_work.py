"""How much work each sample and each item of a global batch is for each unit: what balancers make equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.encoder_items import list_items
from multimodal.balance.unit_cost import UnitCost
from multimodal.cost.flops import UnitFlops, unit_flops
from multimodal.cost.layer_flops import UnitLoad, item_load, sample_load
from multimodal.values.assignment import Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths, index_by_sample

_UNITS_PER_TOKEN = 1024
"""Work is counted in integers, so that sums are exact and every rank decides alike."""


_MEAN_AMOUNT = 1 << 16
"""What a sample of mean work counts as a whole."""


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
        of_token = flops.of(UnitLoad(num_tokens=1)) or flops.of(UnitLoad(num_squared=1)) or 1.0
        scale = _UNITS_PER_TOKEN / of_token
        return [round(scale * sum(flops.of(self.load(unit, atom)) for atom in group)) for group in groups]

    def whole_amounts(self, samples: Sequence[Atom]) -> list[int]:
        """`whole_flops` of each sample as integers, so that sums are exact."""
        totals = [self.whole_flops(sample) for sample in samples]
        mean = sum(totals) / len(totals) if any(totals) else 1.0
        return [round(_MEAN_AMOUNT * total / mean) for total in totals]

    def whole_flops(self, sample: Atom) -> float:
        """FLOPs, forward and backward, that a sample asks of all units together."""
        return sum(sum(self.flops(unit, atoms)) for unit, atoms in self.parts((sample,)).items())

    def parts(self, samples: Microbatch) -> dict[str, Microbatch]:
        """unit -> what it processes of these samples."""
        encoders = {
            unit.name: list_items(samples, unit=unit.name, lengths_by_sample=self.lengths_by_sample)
            for unit in self.graph.encoders
        }
        return {**encoders, self.graph.backbone.name: samples, **{unit.name: samples for unit in self.graph.generators}}

    def flops(self, unit: str, atoms: Sequence[Atom]) -> tuple[float, float]:
        """FLOPs of these atoms' forward and of their backward."""
        loads, flops = [self.load(unit, atom) for atom in atoms], self._flops[unit]
        return sum(map(flops.forward.of, loads)), sum(map(flops.backward.of, loads))

    def load(self, unit: str, atom: Atom) -> UnitLoad:
        """What one atom asks of a unit."""
        sample = self.lengths_by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)
