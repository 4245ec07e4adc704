"""Floating point operations that a model needs for given lengths: the numerator of MFU.

Each kind of gradient that a backward computes costs as much as the forward (Cornstarch 4.2: a frozen layer behind a trainable one
computes input gradients only, a frozen encoder nothing). In a layer with adapters, only adapters have weight gradients.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.unit_load import AtomLoads, UnitLoad, atom_loads
from multimodal.values.arrays.rows import Floats
from multimodal.values.backward_need import layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import LengthBatch, SampleLengths

_ONES = UnitLoad(num_tokens=1), UnitLoad(num_squared=1), UnitLoad(num_outputs=1), UnitLoad(num_sequences=1)


class LoadFlops(NamedTuple):
    """FLOPs as a function of a load, which is linear in its numbers."""

    per_token: float
    per_squared_token: float
    per_output: float
    per_sequence: float

    def of(self, load: UnitLoad) -> float:
        """FLOPs of a load."""
        return sum(per_one * count for per_one, count in zip(self, load, strict=True))

    def of_each(self, loads: AtomLoads) -> Floats:
        """[num_atoms] FLOPs of each load."""
        flops: Floats = self.per_token * loads.num_tokens + self.per_squared_token * loads.num_squared
        flops += self.per_output * loads.num_outputs + self.per_sequence * loads.num_sequences
        return flops


class UnitFlops(NamedTuple):
    """FLOPs of all layers of a unit."""

    forward: LoadFlops
    backward: LoadFlops

    def of(self, load: UnitLoad) -> float:
        """FLOPs of forward and backward."""
        return self.forward.of(load) + self.backward.of(load)


@lru_cache(maxsize=256)
def unit_flops(graph: ModelGraph, unit_name: str, *, vocab_size: int) -> UnitFlops:
    """Count a unit's layers, recomputation left out; vocab_size: padded."""
    unit = graph.unit(unit_name)
    forward, backward = [0.0] * len(_ONES), [0.0] * len(_ONES)
    for index, kind in enumerate(unit.layers):
        need = layers_backward_need(graph, unit_name, range(index, index + 1))
        layer = describe_layer(graph, unit, kind, vocab_size=vocab_size)
        for column, load in enumerate(_ONES):
            linear, attention, frozen = layer.forward_flops(load)
            linear += layer.adapter_flops(load)
            forward[column] += linear + attention + frozen
            backward[column] += linear * layer.passes_gradient(need) + attention * (2 if need.has_backward else 0)
            backward[column] += layer.weight_gradient_flops(load) * need.trains_weights
    return UnitFlops(LoadFlops(*forward), LoadFlops(*backward))


def step_flops(graph: ModelGraph, lengths: Sequence[SampleLengths], *, vocab_size: int) -> float:
    """FLOPs of one optimizer step (forward and backward) over these samples; vocab_size: padded."""
    batch = LengthBatch.of(lengths)
    sums = {unit.name: UnitLoad(*(int(each.sum()) for each in atom_loads(unit, batch.arrays)[1:])) for unit in graph.units}
    return sum(unit_flops(graph, name, vocab_size=vocab_size).of(load) for name, load in sums.items())
