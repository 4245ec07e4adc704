"""Seconds of a layer's segments: the layer's seconds, divided by the segments' products and memory traffic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import ATTENTION_BACKWARD
from multimodal.cost.layers.layer import Layer
from multimodal.cost.seconds.layer_seconds import LayerSeconds, PassParts


@dataclass(frozen=True)
class SegmentShares:
    """Shares of a layer's segments in its computing outside of attention; each row sums to 1."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    attends: Sequence[bool]
    """True for the segment in which tokens attend to each other."""


def segment_shares(layer: Layer, *, cluster: Cluster) -> SegmentShares:
    """Return the shares that follow from FLOPs of products with weights and bytes of elementwise work."""
    work = layer.segment_work(cluster.bytes_per_element)
    bandwidth = cluster.memory_bandwidth_gbytes_per_second
    per_byte = 0.0 if bandwidth is None else 1 / (bandwidth * 1e9)
    products, adapters = (
        np.array([2.0 * count / cluster.flops_per_second for count in counts])
        for counts in ([each.num_weights for each in work], [layer.segment_adapter_weights(each) for each in layer.segments])
    )
    moved, moved_back = (np.array([each.traffic[column] for each in work]) * per_byte for column in (0, 1))
    columns = (products + adapters + moved, products + adapters + moved_back, adapters if layer.adapted else products)
    rows = [(column / column.sum() if column.sum() else np.full(len(work), 1 / len(work))).tolist() for column in columns]
    return SegmentShares(rows[0], rows[1], rows[2], [each.attends for each in work])


class SegmentSeconds(NamedTuple):
    """A layer cut into segments."""

    own: list[LayerSeconds]
    """Seconds of each segment, in the order of a forward."""
    repeated: float
    """Seconds of the layer's forward that full recomputation repeats, part of the input gradient."""


def segment_seconds(whole: LayerSeconds, parts: PassParts, shares: SegmentShares) -> SegmentSeconds:
    """Return the seconds of a layer's segments without waits for tensor parallel ranks; with these they sum up to the whole.

    Attention and the waits for context parallel ranks belong to one segment. For measured curves, attention's backward is assumed
    to cost what a kernel's does, up to the whole input gradient. Seconds may be arrays.
    """
    waiting, waiting_back = (whole.forward_waiting - parts.waiting, whole.input_gradient_waiting - parts.waiting_back)
    computing, computing_back = whole.forward - whole.forward_waiting, whole.input_gradient - whole.input_gradient_waiting
    attention = np.minimum(parts.attention, computing)
    attention_back = np.minimum(attention * (ATTENTION_BACKWARD + parts.repeats_attention), computing_back)
    attention_again = np.minimum(attention, attention_back) * parts.repeats_all
    rest_again = np.minimum(computing - attention, computing_back - attention_back) * parts.repeats_all
    own = [
        LayerSeconds(
            forward * (computing - attention) + attends * (attention + waiting),
            back * (computing_back - attention_back - rest_again) + attends * (attention_back - attention_again + waiting_back),
            weights * whole.weight_gradient,
            attends * waiting,
            attends * waiting_back,
        )
        for forward, back, weights, attends in zip(
            shares.forward, shares.input_gradient, shares.weight_gradient, shares.attends, strict=True
        )
    ]
    return SegmentSeconds(own, attention_again + rest_again)
