"""Learned queries that attend to an encoder's tokens: what they find leaves the encoder in place of the tokens."""

from dataclasses import dataclass, field

from multimodal.values.units.bounds import up_to
from multimodal.values.units.transformer import Transformer


@dataclass(frozen=True)
class Queries:
    """A projector of cross-attention: as many tokens leave of every item as there are queries, however large it is.

    One layer is a resampler (Qwen-VL, Flamingo's perceiver); several with attention among the queries are a Q-Former (BLIP-2).
    """

    num_queries: int = field(metadata=up_to(2**16))
    num_layers: int = field(default=1, metadata=up_to(2**10))
    """Each has cross-attention to the item's tokens, and an MLP with a GELU."""
    has_self_attention: bool = False
    """Queries of an item attend to each other in every layer, before they attend to the item."""
    hidden_size: int | None = field(default=None, metadata=up_to(2**20))
    """Width of queries; None: the encoder's, as for the two that follow."""
    num_attention_heads: int | None = field(default=None, metadata=up_to(2**16))
    ffn_hidden_size: int | None = field(default=None, metadata=up_to(2**24))

    def shape(self, encoder: Transformer) -> Transformer:
        """Return the shape of the queries' layers beside these of the encoder."""
        return Transformer(
            self.num_layers,
            self.hidden_size or encoder.hidden_size,
            self.num_attention_heads or encoder.num_attention_heads,
            self.ffn_hidden_size or encoder.ffn_hidden_size,
            normalization=encoder.normalization,
            activation="gelu",
            add_bias_linear=True,
            layernorm_epsilon=encoder.layernorm_epsilon,
            has_rotary_positions=False,
        )
