"""Transformer layers with a mixture of experts in place of the MLP, or whose tokens attend inside windows."""

from collections.abc import Mapping, Sequence

from multimodal.cost.cluster import Cluster, exchange_cost
from multimodal.cost.layers.collectives import LayerCollectives
from multimodal.cost.layers.layer import (
    GATHER,
    GATHER_AGAIN,
    INDEX_BYTES,
    SUM,
    WIDE_BYTES,
    ActivationBytes,
    ActivationCase,
    LayerFlops,
    LinearShape,
    Segment,
    SegmentWork,
)
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.cost.seconds.layer_curves import Quadratic
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role
from multimodal.values.units.transformer import Experts

_EXCHANGES = 2
"""Exchanges of tokens in a pass: to the experts and back."""


class MoeTransformerLayer(TransformerLayer):
    """A layer with experts. Tokens are assumed to be spread evenly over the experts, since the router's choices are not known."""

    roles = (Role.BACKBONE,)
    fits = staticmethod(lambda unit: unit.transformer.experts is not None)
    exchanges_tokens = True
    segments = (Segment("all", forward=(GATHER, SUM, GATHER), backward=(SUM, GATHER, GATHER_AGAIN, SUM), behind=SUM),)

    @property
    def num_weights(self) -> int:
        """Attention, the router, all experts, and the shared expert."""
        router = self._experts.num_experts * self.unit.transformer.hidden_size
        shared = self._mlp_weights(self._experts.shared_expert_intermediate_size or 0)
        return sum(self._segment_weights[:4]) + router + self.num_expert_weights + shared

    @property
    def num_expert_weights(self) -> int:
        """Weights of the routed experts."""
        return self._experts.num_experts * self._mlp_weights(self.unit.transformer.expert_hidden_size)

    @property
    def expert_share(self) -> float:
        """Share of the experts in the weights that multiply a token."""
        return self.num_expert_weights * self._experts.activated / self._num_met

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """The linear layers of attention."""
        dense = super().linear_layers
        return {name: dense[name] for name in ("linear_qkv", "linear_proj")}

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Count a layer with the weights that one token is multiplied by: router, its experts and shared experts."""
        return LayerFlops(2.0 * load.num_tokens * self._num_met, super().forward_flops(load).attention)

    def segment_work(self, bytes_per_element: int) -> tuple[SegmentWork, ...]:
        """Return the work of the one segment.

        Beyond a dense layer's elements per token, k copies add 4 k h for sorting and restoring the order, k h for their sum, and
        the elements that the activation function moves for each copy.
        """
        shape, topk = self.unit.transformer, self._experts.router_topk
        dense = super().segment_work(bytes_per_element)
        moved, moved_back = (sum(each.traffic[way] for each in dense[:-1]) for way in (0, 1))
        inner = topk * shape.expert_hidden_size + (self._experts.shared_expert_intermediate_size or 0)
        activated, activated_back = (3, 5) if shape.is_gated else (2, 3)
        dispatch = 5 * topk * shape.hidden_size
        moved += bytes_per_element * (activated * inner + dispatch)
        moved_back += bytes_per_element * (activated_back * inner + dispatch + topk * shape.hidden_size)
        return (SegmentWork(round(self._num_met), (moved, moved_back), attends=True),)

    def expert_exchange(self, *, context_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
        """Every tensor parallel rank sends k copies of all rows, evenly over the ranks, and receives as many."""
        if len(ranks) < 2:
            return Quadratic()
        shape = self.unit.transformer
        row_bytes = cluster.bytes_per_element * shape.hidden_size * self._experts.router_topk / context_parallel_size
        latency, occupied, _ = exchange_cost(len(ranks) * row_bytes, ranks=ranks, cluster=cluster)
        return Quadratic(latency, occupied).times(_EXCHANGES)

    def _mlp_bytes(self, *, trains: bool, size: int, is_fused: bool) -> ActivationBytes:
        """Bytes per token: input and scores of the router; sorted copies, inner values and outputs of the experts."""
        shape, experts = self.unit.transformer, self._experts
        topk, wide, hidden = experts.router_topk, max(size, WIDE_BYTES), shape.hidden_size
        balances = trains and experts.aux_loss_coeff > 0
        scores = wide * (experts.num_experts * (1 + balances) + topk)
        router = (wide * hidden if trains else 0) + scores + INDEX_BYTES * topk
        shared = experts.shared_expert_intermediate_size
        inner = shape.expert_hidden_size * topk + (shared or 0)
        kept = (3 if shape.is_gated else 1) + shape.activation.startswith("quick") + trains
        copies = size * hidden * (topk + (shared is not None and size < wide)) if trains else 0
        replicated = copies + size * topk * (hidden + (size < wide)) + 2 * INDEX_BYTES * topk
        return ActivationBytes(float(router), float(size * kept * inner), float(replicated))

    @property
    def _experts(self) -> Experts:
        assert self.unit.transformer.experts is not None, "a model with such layers describes their experts"
        return self.unit.transformer.experts

    @property
    def _num_met(self) -> float:
        """Weights that multiply one token."""
        return self.num_weights - self.num_expert_weights * (1 - self._experts.activated)


class WindowedTransformerLayer(TransformerLayer):
    """Attention is linear in tokens: each token attends to those of its window."""

    roles = (Role.ENCODER,)
    fits = staticmethod(lambda unit: unit.has_windows)
    attends = False

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Count every window as full."""
        assert self.unit.item_input is not None
        attention = 4.0 * self._widths[0] * (self.unit.item_input.tokens_per_window or 0)
        return super().forward_flops(load)._replace(attention=attention * load.num_tokens)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Queries, keys and values in window order are copies; the product that they come from is not kept."""
        kept = super().saved_bytes(load, case)
        shape = self.unit.transformer
        is_repeated = shape.query_groups < shape.num_attention_heads
        if case.recompute == "full" or case.implementation != "local" or (is_repeated and case.recompute is None):
            return kept
        if not shape.has_rotary_positions:  # without windows they would be views of that product
            return kept
        query, key_value = self._widths
        return kept._replace(split=kept.split - load.num_tokens * case.bytes_per_element * (query + key_value // 2))

    def collectives(self, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> LayerCollectives:
        """Context parallel ranks have whole items, so they exchange nothing."""
        found = super().collectives(tensor_parallel_size=tensor_parallel_size, ranks=ranks, cluster=cluster)
        return LayerCollectives(found.tensor)


class SlidingTransformerLayer(TransformerLayer):
    """Attention is linear in tokens: each attends to the last ones before it."""

    roles = (Role.BACKBONE,)
    fits = staticmethod(lambda unit: unit.transformer.sliding_window is not None)
    attends = False

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Count every token's window as full."""
        attention = 4.0 * self._widths[0] * (self.unit.transformer.sliding_window or 0)
        return super().forward_flops(load)._replace(attention=attention * load.num_tokens)


class SlidingMoeTransformerLayer(SlidingTransformerLayer, MoeTransformerLayer):
    """As `sliding_transformer`, with experts in place of the MLP."""

    fits = staticmethod(lambda unit: SlidingTransformerLayer.fits(unit) and MoeTransformerLayer.fits(unit))
