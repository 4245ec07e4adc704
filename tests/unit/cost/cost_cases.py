"""A small cluster and model, and short ways to ask for costs of layers, units and messages."""

from typing import Any

import numpy as np

from multimodal.cost.cluster import Cluster, TransferCost
from multimodal.cost.layers.layer import ActivationCase
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.step_costs import StepCosts
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.action import Action
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work

LINKS = {
    "intra_node": {"bandwidth_gbytes_per_second": 100.0, "latency_us": 2.0},
    "inter_node": {"bandwidth_gbytes_per_second": 10.0, "latency_us": 5.0, "nics_per_node": 2},
}
CLUSTER = {"gpus_per_node": 4, "peak_tflops": 100.0, "memory_gb": 80, "efficiency": 0.5, **LINKS}
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}


def cluster_of(**changes: Any) -> Cluster:
    """Four accelerators to a node of 50 TFLOP/s each."""
    return Cluster.from_dict({**CLUSTER, **changes})


EVEN_CLUSTER = cluster_of(inter_node={**LINKS["intra_node"], "nics_per_node": 2})
"""Nodes as near as the accelerators of one."""


def graph_of(**changes: Any) -> ModelGraph:
    shape = {**SHAPE, **changes}
    return ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **shape}, "llm": {"role": "backbone", **shape}}})


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
    return sum(unit_parameters(graph, unit) for unit in graph.units)


def unit_parameters(graph: ModelGraph, unit: Unit, *, vocab_size: int | None = None) -> int:
    """Parameters of one unit; tied word embeddings count once."""
    size = vocab_size if vocab_size is not None else unit.vocab_size or 0
    layers = [describe_layer(graph, unit, kind, vocab_size=size) for kind in unit.layers]
    return sum(layer.num_parameters for layer in layers) - (layers[-1].num_weights if unit.ties_embeddings else 0)


def transfer(costs: StepCosts, send: Action, *, shape: StepShape) -> TransferCost:
    """Return the cost of the message that a send of the step starts."""
    work = step_work(shape)
    found = costs.of_pieces(work, np.array([work.numbers(lowered=True)[send]]))
    return TransferCost(*(values[0].item() for values in (found.latency_seconds, found.seconds, found.links)))
