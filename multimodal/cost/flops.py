"""Floating point operations that a model needs for given lengths: the numerator of MFU.

A backward costs as much as the forward for each kind of gradient that is needed (Cornstarch 4.2: a frozen layer behind something
trainable computes input gradients only, a frozen encoder nothing).
"""

from collections.abc import Iterable

from multimodal.cost.layer_flops import add_loads, layer_forward_flops, sample_load
from multimodal.cost.layer_seconds import passes_gradient
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.sample_lengths import SampleLengths


def step_flops(graph: ModelGraph, lengths: Iterable[SampleLengths], *, vocab_size: int) -> float:
    """FLOPs of one optimizer step (forward and backward) over these samples; vocab_size: padded."""
    samples = tuple(lengths)
    return sum(_unit_flops(graph, unit, samples, vocab_size=vocab_size) for unit in graph.units)


def num_linear_backwards(need: BackwardNeed) -> int:
    """Return how many times its forward a weight matrix's backward costs."""
    return {BackwardNeed.NONE: 0, BackwardNeed.INPUT_GRADIENT: 1, BackwardNeed.WEIGHT_GRADIENT: 1, BackwardNeed.FULL: 2}[need]


def _unit_flops(graph: ModelGraph, unit: Unit, samples: tuple[SampleLengths, ...], *, vocab_size: int) -> float:
    load = add_loads(sample_load(unit, sample) for sample in samples)
    total = 0.0
    for index, kind in enumerate(unit.layers):
        need = layers_backward_need(graph, unit.name, range(index, index + 1))
        linear, attention = layer_forward_flops(graph, unit, kind, load, vocab_size=vocab_size)
        num_gradients = passes_gradient(kind, need) + need.trains_weights
        total += linear * (1 + num_gradients) + attention * (3 if need.has_backward else 1)
    return total
