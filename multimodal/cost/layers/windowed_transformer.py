"""Transformer layers whose tokens attend inside windows of their image, chunks of their clip, or to the last tokens of a text."""

from collections.abc import Sequence

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import LayerCollectives
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, LayerFlops
from multimodal.cost.layers.moe_transformer import MoeTransformerLayer
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


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
