"""Transformer layers whose tokens attend inside windows of their image, or of the text before them."""

from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module

from multimodal.attention.core_attention import WindowedAttention
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.model.layers.layer_kind import InputContext, StagePass
from multimodal.model.layers.moe_transformer import MoeTransformerKind
from multimodal.model.layers.transformer import TransformerKind
from multimodal.values.model_graph import Unit


class WindowedTransformerKind(TransformerKind):
    """A transformer layer whose core attention takes tokens window by window."""

    def adapt(self, spec: ModuleSpec) -> None:
        """Wrap the core attention in one that reorders tokens."""
        attention = spec.submodules.self_attention.submodules
        inner = attention.core_attention
        attention.core_attention = ModuleSpec(module=WindowedAttention, params={"inner": inner})

    def prepare(self, packed: PackedLengths, context: InputContext) -> None:
        """Derive masks and the other inputs of attention, for windows."""
        super().prepare(packed.window_sequences, context)

    def core_attention(self, layer: Module) -> None:
        """Return None: its time is linear in tokens, like that of products."""


class SlidingTransformerKind(TransformerKind):
    """A transformer layer of the LLM whose tokens attend to the last ones before them."""

    def window(self, unit: Unit) -> int | None:
        """Return the unit's window."""
        return unit.transformer.sliding_window

    def frequencies(self, given: StagePass) -> Tensor | None:
        """Return the angles of layers with windows, if the unit has some of their own."""
        return given.frequencies if given.local_frequencies is None else given.local_frequencies


class SlidingMoeTransformerKind(SlidingTransformerKind, MoeTransformerKind):
    """The same with experts in place of the MLP."""
