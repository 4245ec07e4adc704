"""Seconds of one layer and its parts; a layer's segments divide them by their products and memory traffic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import ATTENTION_BACKWARD
from multimodal.cost.layers.layer import Layer
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.values.backward_need import BackwardNeed


class LayerSeconds(NamedTuple):
    """Seconds of one layer over one load, on one of the ranks that share it; a full backward takes both gradients.

    B = B_input + B_weight (Cornstarch 4.2; "Bd" and "Bw" there). `BackwardNeed` decides which of them run.
    """

    forward: float
    """Including collectives inside the layer."""
    input_gradient: float
    """The whole backward except weight gradients: attention's backward, recomputation and collectives included."""
    weight_gradient: float
    forward_waiting: float = 0.0
    """Seconds of `forward` in which the rank waits for a collective inside the layer."""
    input_gradient_waiting: float = 0.0
    """Seconds of `input_gradient` in which the rank waits."""

    def backward(self, kind: str, need: BackwardNeed) -> float:
        """Return the seconds of the backward that a layer of this kind needs."""
        input_gradient = self.input_gradient if LAYER_KINDS[kind].passes_gradient(need) else 0.0
        return input_gradient + (self.weight_gradient if need.trains_weights else 0.0)


class PassParts(NamedTuple):
    """Parts of a layer's seconds."""

    attention: float
    """Core attention in a forward, without waiting."""
    waiting: float
    """Seconds in which a forward waits for tensor parallel ranks."""
    waiting_back: float
    """Seconds for which an input gradient waits, recomputation included."""
    repeats_attention: bool
    """True if the input gradient recomputes attention."""
    repeats_all: bool
    """True if the input gradient recomputes the whole forward."""


@dataclass(frozen=True)
class SegmentShares:
    """Shares of a layer's segments in its computing outside of attention; each row sums to 1."""

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    attends: Sequence[bool]


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
