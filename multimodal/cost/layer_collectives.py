"""Collectives inside a transformer layer, during which its ranks compute nothing."""

from collections.abc import Sequence

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds
from multimodal.cost.quadratic import Quadratic
from multimodal.values.model_graph import LayerKind, Unit

_PER_PASS = 4
"""A transformer layer all-gathers and reduce-scatters its activations twice per pass (sequence parallelism)."""


def layer_waiting(unit: Unit, kind: LayerKind, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
    """Return the seconds of collectives in one pass (a forward, or the way back) of one layer, over all tokens of a load.

    ranks: of the stage; the tensor parallel rank is the faster index. Tensor parallel ranks exchange their context parallel
    rank's hidden states; context parallel ranks gather keys and values (and reduce their gradients on the way back).
    """
    if kind is not LayerKind.TRANSFORMER:
        return Quadratic()
    shape, size = unit.transformer, cluster.bytes_per_element
    tensor_group, context_group = ranks[:tensor_parallel_size], ranks[::tensor_parallel_size]
    hidden_bytes = size * shape.hidden_size / len(context_group)
    key_value_bytes = size * 2 * shape.query_groups * shape.head_channels / tensor_parallel_size
    tensor = _collective(hidden_bytes, ranks=tensor_group, cluster=cluster).times(_PER_PASS)
    return tensor.plus(_collective(key_value_bytes, ranks=context_group, cluster=cluster))


def _collective(bytes_per_token: float, *, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
    latency = collective_seconds(0.0, ranks=ranks, cluster=cluster)
    return Quadratic(latency, collective_seconds(bytes_per_token, ranks=ranks, cluster=cluster) - latency)
