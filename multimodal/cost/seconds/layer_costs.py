"""Seconds of a model's layers on a cluster, for planners, simulator and emulation alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import ATTENTION_BACKWARD, LayerCollectives
from multimodal.cost.layers.layer import Layer, Recompute
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer
from multimodal.cost.memoize import memoized
from multimodal.cost.seconds.layer_curves import Counts, Curve, LayerCurves, Quadratic, counted_tokens
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.unit_load import CutLoad, UnitLoad
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph


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


class Sharing(NamedTuple):
    """How ranks share a layer."""

    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    recompute: Recompute | None = None
    ranks: tuple[int, ...] | None = None
    """Those of the stage, for its collectives, as `Stage.ranks`; None: neighbours from a node's first accelerator on."""
    expert_ranks: tuple[int, ...] = ()
    """Those that share the layer's experts, including the rank itself."""


ALONE = Sharing()
"""One rank computes the layer."""
_ONE_TOKEN = UnitLoad(1, 1, 1)
_PRODUCTS_PER_ADAPTER = 2
NO_SECONDS = LayerSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of single layers. Nothing here depends on frozen units: `LayerSeconds.backward` accounts for them.

    Computations come from a profile or from the cluster's description; collectives always from the cluster's links.

    Raises ConfigError when the profile is of another model.
    """

    graph: ModelGraph
    cluster: Cluster
    vocab_size: int
    profile: LayerProfile | None = None
    """Measured curves; layers that it does not list are computed from the cluster's description."""
    num_overlapped_parts: int = 1
    """Parts into which a tensor parallel collective and the matrix product beside it are cut: one part is sent while another is
    computed, so that ranks wait for one part only (DistTrain's StepCCL, section 6). 1: they wait for the whole collective."""

    def __post_init__(self) -> None:
        if self.profile is not None:
            self.profile.check(self.graph)

    def seconds(
        self, unit: str, kind: str, load: UnitLoad, sharing: Sharing = ALONE, *, cut: CutLoad | None = None
    ) -> LayerSeconds:
        """Return the seconds of one layer of this kind over one microbatch; O(1).

        load: of the whole microbatch, before tensor and context parallelism divide it; an empty one takes no time. Its numbers
        may be arrays over many microbatches whose tokens are not shared by context parallel ranks; the seconds are then arrays,
        too. cut: the part of the load for which context parallel ranks gather keys and values; None: all.
        """
        is_array = isinstance(load.num_tokens, np.ndarray)
        if not is_array and not load.num_tokens:
            return NO_SECONDS
        prepared = self._prepare(unit, kind, sharing)
        counted = counted_tokens(load, counts=prepared.counts)
        forward = prepared.curves.forward.at(*counted)
        input_gradient = prepared.curves.input_gradient.at(*counted)
        weight_gradient = prepared.curves.weight_gradient.at(*counted)
        for curve in prepared.repeated:
            input_gradient += curve.at(*counted)
        cut = cut or CutLoad(load, load.num_tokens)
        forward = forward + prepared.cutting
        repeated = 0.0  # in a recomputed layer, attention over several ranks keeps nothing
        if prepared.recompute == "full" and prepared.collectives.is_spread and cut.num_gathered:
            repeated = prepared.curves.attention.at(*counted_tokens(cut.attending, counts=prepared.counts))
        input_gradient += prepared.cutting_back + repeated
        waiting, waiting_back = prepared.waiting(load, cut)
        seconds = LayerSeconds(forward + waiting, input_gradient + waiting_back, weight_gradient, waiting, waiting_back)
        return LayerSeconds(*((load.num_tokens > 0) * each for each in seconds)) if is_array else seconds

    def segments(
        self, unit: str, kind: str, load: UnitLoad, sharing: Sharing, *, cut: CutLoad | None
    ) -> tuple[list[LayerSeconds], float]:
        """Return the seconds of a layer's segments, in the order of a forward, without waits for tensor parallel ranks.

        And the seconds of the layer's forward that full recomputation repeats; all of these and the waits sum up to the whole.
        Attention and the waits for context parallel ranks belong to one segment. For measured curves, attention's backward is
        assumed to cost what a kernel's does, up to the whole input gradient. Arguments as in `seconds`; seconds may be arrays.
        """
        whole, prepared = self.seconds(unit, kind, load, sharing, cut=cut), self._prepare(unit, kind, sharing)
        of_tensor, of_tensor_back = self.tensor_waits(unit, kind, load, sharing)
        waiting, waiting_back = whole.forward_waiting - of_tensor, whole.input_gradient_waiting - of_tensor_back
        computing, computing_back = whole.forward - whole.forward_waiting, whole.input_gradient - whole.input_gradient_waiting
        attending = (load.num_tokens > 0) * prepared.curves.attention.at(*counted_tokens(load, counts=prepared.counts))
        attention = np.minimum(attending, computing)
        repeats_any = sharing.recompute is not None and self._describe(unit, kind).recomputes
        repeats_all = repeats_any and sharing.recompute == "full"
        attention_back = np.minimum(attention * (ATTENTION_BACKWARD + repeats_any), computing_back)
        attention_again = np.minimum(attention, attention_back) * repeats_all
        rest_again = np.minimum(computing - attention, computing_back - attention_back) * repeats_all
        rest_back, attending_back = computing_back - attention_back - rest_again, attention_back - attention_again + waiting_back
        own = []
        for forward, back, weights, attends in self._segment_shares(unit, kind):
            ahead = forward * (computing - attention) + attends * (attention + waiting)
            behind, waits = back * rest_back + attends * attending_back, (attends * waiting, attends * waiting_back)
            own.append(LayerSeconds(ahead, behind, weights * whole.weight_gradient, *waits))
        return own, attention_again + rest_again

    @memoized
    def _segment_shares(self, unit: str, kind: str) -> Sequence[tuple[float, float, float, bool]]:
        """Return each segment's shares of forward and both gradients outside of attention, and True if tokens attend in it.

        They follow from the FLOPs of products with weights and the bytes of elementwise work; each share sums to 1.
        """
        layer, cluster = self._describe(unit, kind), self.cluster
        work, bandwidth = layer.segment_work(cluster.bytes_per_element), cluster.memory_bandwidth_gbytes_per_second
        per_byte = 0.0 if bandwidth is None else 1 / (bandwidth * 1e9)
        products, adapters = (
            np.array([2.0 * count / cluster.flops_per_second for count in counts])
            for counts in ([each.num_weights for each in work], [layer.segment_adapter_weights(each) for each in layer.segments])
        )
        moved, moved_back = (np.array([each.traffic[column] for each in work]) * per_byte for column in (0, 1))
        columns = (products + adapters + moved, products + adapters + moved_back, adapters if layer.adapted else products)
        rows = [(column / column.sum() if column.sum() else np.full(len(work), 1 / len(work))).tolist() for column in columns]
        return list(zip(*rows, [each.attends for each in work], strict=True))

    def expert_products(self, unit: str, kind: str, load: UnitLoad, sharing: Sharing) -> float:
        """Return the seconds of the experts' products in a forward; either gradient takes as long. Arguments as in `seconds`."""
        share, prepared = self._describe(unit, kind).expert_share, self._prepare(unit, kind, sharing)
        counted = counted_tokens(load, counts=prepared.counts)
        products = prepared.curves.forward.at(*counted) - prepared.curves.attention.at(*counted)
        return (load.num_tokens > 0) * share * products

    def tensor_waits(self, unit: str, kind: str, load: UnitLoad, sharing: Sharing) -> tuple[float, float]:
        """Return the seconds that a forward waits for tensor parallel ranks, and an input gradient, recomputation included."""
        waiting = (load.num_tokens > 0) * self._prepare(unit, kind, sharing).waiting_for_tensor_ranks(load)
        return waiting, waiting * (2 if sharing.recompute == "full" else 1)

    def collectives(self, unit: str, kind: str, sharing: Sharing) -> LayerCollectives:
        """Return a layer's collectives. Ranks with equal collectives take equal seconds."""
        return self._prepare(unit, kind, sharing).collectives

    @memoized
    def curves(self, unit: str, kind: str, *, tensor_parallel_size: int, context_parallel_size: int) -> LayerCurves:
        """Return the curves of the layer's computations on one rank, without collectives and recomputation."""
        measured = self.profile and self.profile.find(unit, kind, tensor_parallel_size, context_parallel_size)
        num_ranks = tensor_parallel_size * context_parallel_size
        return measured or analytic_curves(self._describe(unit, kind), num_ranks=num_ranks, cluster=self.cluster)

    def _describe(self, unit: str, kind: str) -> Layer:
        return describe_layer(self.graph, self.graph.unit(unit), kind, vocab_size=self.vocab_size)

    @memoized
    def _prepare(self, unit: str, kind: str, sharing: Sharing) -> "_Prepared":
        """Look up, once, the values that are the same for all loads of a layer."""
        layer, (tensor_size, context_size, recompute, ranks, expert_ranks) = self._describe(unit, kind), sharing
        curves = self.curves(unit, kind, tensor_parallel_size=tensor_size, context_parallel_size=context_size)
        own_ranks = range(tensor_size * context_size) if ranks is None else ranks
        collectives = layer.collectives(tensor_parallel_size=tensor_size, ranks=own_ranks, cluster=self.cluster)
        exchange = layer.expert_exchange(context_parallel_size=context_size, ranks=expert_ranks, cluster=self.cluster)
        collectives = collectives._replace(experts=exchange)
        repeated: list[Curve] = []
        if recompute and layer.recomputes:
            repeated.append(curves.forward if recompute == "full" else curves.attention)
        is_cut = collectives.tensor != Quadratic()
        # A product takes a constant however small it is; measured curves that are no quadratic have none.
        constant = curves.weight_gradient.constant if isinstance(curves.weight_gradient, Quadratic) else 0.0
        cutting = constant * (self.num_overlapped_parts - 1) if is_cut else 0.0
        counts: Counts = layer.counts if layer.counts != "given" or self.profile is None else "inside"
        parts, cutting_back = self.num_overlapped_parts, 2 * cutting if recompute == "full" else cutting
        return _Prepared(curves, tuple(repeated), collectives, recompute, counts, parts, cutting, cutting_back)


class _Prepared(NamedTuple):
    """The part of a layer's seconds that does not depend on the load."""

    curves: LayerCurves
    repeated: tuple[Curve, ...]
    """Curves of the work that the backward recomputes."""
    collectives: LayerCollectives
    recompute: Recompute | None
    counts: Counts
    num_parts: int
    cutting: float
    """Seconds that a forward loses because its products are cut into parts: each part has a small product's constant."""
    cutting_back: float
    """Seconds that an input gradient, including recomputation, loses in the same way."""

    def waiting(self, load: UnitLoad, cut: CutLoad) -> tuple[float, float]:
        """Seconds of waiting for collectives in a forward, and in an input gradient with its recomputation."""
        tensor = self.waiting_for_tensor_ranks(load) + self.collectives.experts.at(load.num_tokens, 0)
        again = tensor if self.recompute == "full" else 0.0
        if not self.collectives.is_spread or not cut.num_gathered:
            return tensor, tensor + again
        num_tokens, num_squared, _, num_sequences = cut.attending
        attention = self.curves.attention.at(num_tokens, num_squared, num_sequences)
        gathering = self.collectives.exposed_keys(cut.num_gathered, attention_seconds=attention)
        computing = attention * (ATTENTION_BACKWARD + (self.recompute is not None))
        way_back = self.collectives.exposed_keys(cut.num_gathered, attention_seconds=computing, num_ways=2) + tensor
        return tensor + gathering, way_back + (again + gathering if self.recompute == "full" else 0.0)

    def waiting_for_tensor_ranks(self, load: UnitLoad) -> float:
        """Seconds of waiting for tensor parallel ranks in a forward."""
        num_tokens, num_squared = load[:2]
        products = self.curves.weight_gradient.at(num_tokens, num_squared)
        return self.collectives.exposed_tensor(num_tokens, num_squared, products_seconds=products, num_parts=self.num_parts)


def analytic_curves(layer: Layer, *, num_ranks: int, cluster: Cluster) -> LayerCurves:
    """Return the curves of one layer on one of the `num_ranks` (tensor x context parallel) ranks that share it.

    A matrix product of w FLOPs on one rank reaches `efficiency x w / (w + half)` of the peak, so it takes
    `(w + half) / (peak x efficiency)`: the whole layer is an exact quadratic in tokens, with a constant for each small product.

    Input and weight gradients each repeat the forward's products with weights. If a layer has adapters, its weight gradients are
    only those of adapters (the half of them that tensor parallel ranks do not share is counted as shared); attention's backward
    belongs to the input gradient, as does that of the elementwise work (`Layer.traffic`).
    """
    before = layer.unit.num_conditions - 1 if layer.counts == "made" else 0
    one_token = UnitLoad(1, num_outputs=int(layer.counts in ("leaving", "made")))
    one_sequence = UnitLoad(before, num_outputs=layer.num_queries, num_sequences=1)
    of_token, of_square, of_sequence = map(layer.forward_flops, (one_token, UnitLoad(num_squared=1), one_sequence))
    half = cluster.half_efficiency_gflop * 1e9
    speed, attention_speed = cluster.flops_per_second, cluster.attention_flops_per_second
    again = counted_tokens(one_sequence, counts=layer.counts)[0]  # the tokens as which a sequence counts anyway
    per_token, per_sequence = (flops.linear / num_ranks / speed for flops in (of_token, of_sequence))
    products = Quadratic(layer.num_products * half / speed, per_token, sequence=per_sequence - again * per_token)
    adapters = Quadratic(
        _PRODUCTS_PER_ADAPTER * len(layer.adapted) * half / speed, layer.adapter_flops(_ONE_TOKEN) / num_ranks / speed
    )
    attention = Quadratic()
    if of_square.attention or of_token.attention:
        terms = (flops.attention / num_ranks / attention_speed for flops in (of_token, of_square, of_sequence))
        attention = Quadratic(half / attention_speed, *terms)
    frozen = Quadratic(0.0, *(flops.frozen / speed for flops in (of_token, of_square, of_sequence)))
    traffic, bandwidth = layer.traffic(cluster.bytes_per_element), cluster.memory_bandwidth_gbytes_per_second or math.inf
    moving, moving_back = (Quadratic(linear=moved / (num_ranks * bandwidth * 1e9)) for moved in traffic)
    forward = products.plus(adapters, attention, moving, frozen)
    input_gradient = products.plus(adapters, attention.times(ATTENTION_BACKWARD), moving_back)
    return LayerCurves(forward, input_gradient, adapters if layer.adapted else products, attention)
