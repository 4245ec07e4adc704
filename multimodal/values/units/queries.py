"""Learned queries that attend to an encoder's tokens; their results leave the encoder in place of the tokens."""

from dataclasses import dataclass, field

from multimodal.values.units.bounds import up_to
from multimodal.values.units.transformer import Transformer


@dataclass(frozen=True)
class Queries:
    """A projector of cross-attention: every item leaves as many tokens as there are queries, whatever its size.

    One layer is a resampler (Qwen-VL, Flamingo's perceiver); several with attention among the queries are a Q-Former (BLIP-2).
    """

    num_queries: int = field(metadata=up_to(2**16))
    num_layers: int = field(default=1, metadata=up_to(2**10))
    """Number of layers, each with cross-attention to the item's tokens and an MLP with a GELU."""
    has_self_attention: bool = False
    """In every layer the queries of an item attend to each other before they attend to the item."""
    hidden_size: int | None = field(default=None, metadata=up_to(2**20))
    """Width of queries; None: the encoder's. The same default holds for the two fields below."""
    num_attention_heads: int | None = field(default=None, metadata=up_to(2**16))
    ffn_hidden_size: int | None = field(default=None, metadata=up_to(2**24))

    def shape(self, encoder: Transformer) -> Transformer:
        """Return the shape of the queries' layers; encoder: the source of defaults."""
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
