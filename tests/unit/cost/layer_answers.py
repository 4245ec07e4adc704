"""Short ways to ask layers for their costs, and sums over units."""

from typing import Any

from multimodal.cost.layers.layer import ActivationCase
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph, Unit


def layer_activation_bytes(
    graph: ModelGraph,
    unit: str,
    kind: str,
    load: UnitLoad,
    *,
    need: BackwardNeed,
    vocab_size: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = True,
    **case: Any,
) -> float:
    """Bytes that a layer keeps for its backward, all tensor parallel ranks together."""
    layer = describe_layer(graph, graph.unit(unit), kind, vocab_size=vocab_size)
    found = layer.activation_bytes(load, ActivationCase(need, **case))
    return found.all_ranks(tensor_parallel_size=tensor_parallel_size, sequence_parallel=sequence_parallel)


def parameter_count(graph: ModelGraph) -> int:
    """Parameters of all units, for the vocabulary of the model file."""
    return sum(unit_parameters(graph, unit) for unit in graph.units)


def unit_parameters(graph: ModelGraph, unit: Unit, *, vocab_size: int | None = None) -> int:
    """Parameters of one unit; tied word embeddings count once."""
    size = vocab_size if vocab_size is not None else unit.vocab_size or 0
    layers = [describe_layer(graph, unit, kind, vocab_size=size) for kind in unit.layers]
    return sum(layer.num_parameters for layer in layers) - (layers[-1].num_weights if unit.ties_embeddings else 0)
