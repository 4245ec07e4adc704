"""A layer's curves from a cluster's description: products over reachable speed, elementwise bytes over memory bandwidth.

A matrix product of w FLOPs on one rank reaches `efficiency x w / (w + half)` of the peak, so it takes
`(w + half) / (peak x efficiency)`: the whole layer is an exact quadratic in tokens, with a constant for each small product.
"""

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import ATTENTION_BACKWARD
from multimodal.cost.layers.layer import Layer
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.unit_load import UnitLoad

_ONE_TOKEN = UnitLoad(1, 1, 1)
_ONE_INSIDE = UnitLoad(1, 1)
_PRODUCTS_PER_ADAPTER = 2


def analytic_curves(layer: Layer, *, num_ranks: int, cluster: Cluster) -> LayerCurves:
    """Return the curves of one layer on one of the `num_ranks` (tensor x context parallel) ranks that share it.

    Input and weight gradients each repeat the forward's products with weights. If a layer has adapters, its weight gradients are
    only those of adapters (the half of them that tensor parallel ranks do not share is counted as shared); attention's backward
    belongs to the input gradient, as does that of the elementwise work (`Layer.traffic`).
    """
    linear, attention_flops = layer.forward_flops(_ONE_TOKEN if layer.counts == "leaving" else _ONE_INSIDE)
    in_windows = layer.forward_flops(UnitLoad(1)).attention
    of_queries = layer.forward_flops(UnitLoad(num_outputs=layer.num_queries)).linear
    half = cluster.half_efficiency_gflop * 1e9
    speed, attention_speed = cluster.flops_per_second, cluster.attention_flops_per_second
    products = Quadratic(layer.num_products * half / speed, linear / num_ranks / speed, sequence=of_queries / num_ranks / speed)
    adapters = Quadratic(
        _PRODUCTS_PER_ADAPTER * len(layer.adapted) * half / speed, layer.adapter_flops(_ONE_TOKEN) / num_ranks / speed
    )
    attention = Quadratic()
    if attention_flops:
        per_token, per_square = (flops / num_ranks / attention_speed for flops in (in_windows, attention_flops - in_windows))
        attention = Quadratic(half / attention_speed, per_token, per_square)
    moving, moving_back = _elementwise(layer, num_ranks=num_ranks, cluster=cluster)
    return LayerCurves(
        forward=products.plus(adapters, attention, moving),
        input_gradient=products.plus(adapters, attention.times(ATTENTION_BACKWARD), moving_back),
        weight_gradient=adapters if layer.adapted else products,
        attention=attention,
    )


def _elementwise(layer: Layer, *, num_ranks: int, cluster: Cluster) -> tuple[Quadratic, Quadratic]:
    """Return the curves of the forward and of the backward."""
    if cluster.memory_bandwidth_gbytes_per_second is None:
        return Quadratic(), Quadratic()
    traffic = layer.traffic(cluster.bytes_per_element)
    bytes_per_second = num_ranks * cluster.memory_bandwidth_gbytes_per_second * 1e9
    return Quadratic(linear=traffic.forward / bytes_per_second), Quadratic(linear=traffic.input_gradient / bytes_per_second)
