"""A layer's curves from a cluster's description: products over reachable speed, elementwise bytes over memory bandwidth.

A matrix product of w FLOPs on one rank reaches `efficiency x w / (w + half)` of the peak, so it takes
`(w + half) / (peak x efficiency)`: the whole layer is an exact quadratic in tokens, whose constant small products pay.
"""

from multimodal.cost.cluster import Cluster
from multimodal.cost.layer_curves import LayerCurves
from multimodal.cost.layer_flops import UnitLoad, layer_forward_flops, num_products
from multimodal.cost.memory_traffic import layer_traffic_bytes
from multimodal.cost.quadratic import Quadratic
from multimodal.values.model_graph import LayerKind, ModelGraph, Unit

_ONE_TOKEN = UnitLoad(1, 1, 1)
ATTENTION_BACKWARD = 2.5
"""Flash attention's backward over its forward: five products instead of two, since scores are not kept but computed again
(Dao et al., FlashAttention, section 3)."""


def analytic_curves(
    graph: ModelGraph, unit: Unit, kind: LayerKind, *, num_ranks: int, cluster: Cluster, vocab_size: int
) -> LayerCurves:
    """Return the curves of one layer on one of the `num_ranks` (tensor x context parallel) ranks that share it.

    Input and weight gradients repeat the forward's products with weights once each; attention's backward belongs to the input
    gradient, as does that of the elementwise work (`layer_traffic_bytes`). vocab_size: padded.
    """
    products = _products(graph, unit, kind, num_ranks=num_ranks, cluster=cluster, vocab_size=vocab_size)
    attention = _attention(graph, unit, kind, num_ranks=num_ranks, cluster=cluster)
    moving, moving_back = _elementwise(unit, kind, num_ranks=num_ranks, cluster=cluster, vocab_size=vocab_size)
    return LayerCurves(
        forward=products.plus(attention, moving),
        input_gradient=products.plus(attention.times(ATTENTION_BACKWARD), moving_back),
        weight_gradient=products,
        attention=attention,
    )


def _products(graph: ModelGraph, unit: Unit, kind: LayerKind, *, num_ranks: int, cluster: Cluster, vocab_size: int) -> Quadratic:
    flops = layer_forward_flops(graph, unit, kind, _ONE_TOKEN, vocab_size=vocab_size).linear
    constant = num_products(kind) * cluster.half_efficiency_gflop * 1e9
    return Quadratic(constant / cluster.flops_per_second, flops / num_ranks / cluster.flops_per_second)


def _attention(graph: ModelGraph, unit: Unit, kind: LayerKind, *, num_ranks: int, cluster: Cluster) -> Quadratic:
    flops = layer_forward_flops(graph, unit, kind, _ONE_TOKEN, vocab_size=0).attention
    if not flops:
        return Quadratic()
    speed = cluster.attention_flops_per_second
    return Quadratic(cluster.half_efficiency_gflop * 1e9 / speed, 0.0, flops / num_ranks / speed)


def _elementwise(
    unit: Unit, kind: LayerKind, *, num_ranks: int, cluster: Cluster, vocab_size: int
) -> tuple[Quadratic, Quadratic]:
    """Forward and backward."""
    if cluster.memory_bandwidth_gbytes_per_second is None:
        return Quadratic(), Quadratic()
    traffic = layer_traffic_bytes(unit, kind, vocab_size=vocab_size, bytes_per_element=cluster.bytes_per_element)
    bytes_per_second = num_ranks * cluster.memory_bandwidth_gbytes_per_second * 1e9
    return Quadratic(linear=traffic.forward / bytes_per_second), Quadratic(linear=traffic.input_gradient / bytes_per_second)
