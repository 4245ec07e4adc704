"""The shape of a unit's transformer layers, and of the experts that take the place of their MLPs."""

from dataclasses import dataclass, field
from typing import Literal

from multimodal.values.typed_reader import BRIEF, up_to

MOST_LAYERS = 10_000
"""Transformer layers of a unit; every list of layers is bounded by it."""


@dataclass(frozen=True)
class Experts:
    """MLPs in place of one (mixture of experts); a router selects a few for every token, and drops none. Names are Megatron's."""

    num_experts: int = field(metadata=up_to(2**14))
    router_topk: int = field(default=2, metadata=up_to(2**10))
    """Experts that compute each token."""
    ffn_hidden_size: int | None = field(default=None, metadata={**BRIEF, **up_to(2**24)})
    """Inner width of every expert; None: that of the unit's other MLPs."""
    shared_expert_intermediate_size: int | None = field(default=None, metadata={**BRIEF, **up_to(2**24)})
    """Inner width of an additional MLP that computes every token; None: there is none."""
    aux_loss_coeff: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1000})
    """Weight of the loss that balances experts within every sequence (DeepSeek-V3, 2.1.2), so that no plan changes it."""
    router_pre_softmax: bool = False
    """Weigh the selected experts by their share among all experts instead of among the selected ones."""

    @property
    def activated(self) -> float:
        """Share of the experts' weights that multiply a token."""
        return self.router_topk / self.num_experts


@dataclass(frozen=True)
class Transformer:
    """The shape of a unit's transformer layers, under Megatron's names."""

    num_layers: int = field(metadata={"minimum": 0, "maximum": MOST_LAYERS})
    """0 only in encoders that other encoders feed: the inputs then go straight to the projector."""
    hidden_size: int = field(metadata=up_to(2**20))
    num_attention_heads: int = field(metadata=up_to(2**16))
    ffn_hidden_size: int = field(metadata=up_to(2**24))
    num_query_groups: int | None = field(default=None, metadata=up_to(2**16))
    """Key and value heads (grouped-query attention); None: as many as query heads."""
    kv_channels: int | None = field(default=None, metadata=up_to(2**16))
    """Channels per head; None: hidden_size / num_attention_heads."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    activation: Literal["swiglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "quick_gelu"] = "swiglu"
    """Activation of the MLP: with a gate SiLU, GELU's approximation by tanh, or x sigmoid(1.702 x); without one GELU or one of
    the latter two."""
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    add_proj_bias: bool = False
    """The projection behind attention has a bias, even if add_bias_linear is false."""
    add_mlp_bias: bool = False
    """Both matrices of the MLP have a bias, even if add_bias_linear is false."""
    qk_layernorm: bool = False
    """Norms over the channels of each query and key head, before rotary positions (Qwen3)."""
    qk_norm_spans_heads: bool = False
    """Encoders, with qk_layernorm: one norm of the channels of all heads together (InternViT 6B), so tensor parallel ranks cannot
    share the heads."""
    layernorm_epsilon: float = field(default=1e-5, metadata={"above": 0, "maximum": 1})
    layernorm_zero_centered_gamma: bool = False
    """Backbone only, RMSNorm: norms multiply by 1 + their weights (Gemma)."""
    has_post_norms: bool = False
    """Backbone only: the outputs of attention and MLP are normalised before they are added to the residual stream (Gemma 2)."""
    scales_embeddings: bool = False
    """Backbone only: word embeddings are multiplied by the square root of hidden_size (Gemma)."""
    query_scalar: int | None = field(default=None, metadata=up_to(2**20))
    """Backbone only: queries times keys are divided by its square root; None: by that of the channels of a head."""
    attention_softcap: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """Backbone only: scores of attention are bounded by it, as softcap x tanh(score / softcap) (Gemma 2); None: they are not."""
    logit_softcap: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """Backbone only: the same for logits."""
    has_layer_scale: bool = False
    """The outputs of attention and MLP are scaled, channel by channel, before they are added to the residual stream."""
    has_rotary_positions: bool = True
    """False: layers use no positions; the unit's first layer adds learned ones."""
    has_staggered_axes: bool = False
    """Encoders with rows and columns: columns rotate by the frequencies between those of rows (Pixtral), not by the same."""
    rotary_base: float = field(default=10000.0, metadata={"above": 0, "maximum": 1e30})
    rotary_scaling: tuple[float, ...] = field(default=(), metadata={"above": 0, "maximum": 1e30})
    """Backbone only: Llama 3.1's rule for long contexts: factor, low_freq_factor, high_freq_factor, original context length."""
    rotary_dynamic_scaling: tuple[float, ...] = field(default=(), metadata={"above": 0, "maximum": 1e30})
    """Backbone only: factor and context length of positions that slow down in sequences beyond that length (dynamic NTK). Shorter
    sequences rotate as without it; longer ones are not trained."""
    rotary_factors: tuple[float, ...] = field(default=(), metadata={"above": 0, "maximum": 1e30})
    """Backbone only: numbers by which the rotary frequency of each channel pair of a head is divided, which linear scaling, YaRN
    and LongRoPE come to; empty: none."""
    rotary_long_factors: tuple[float, ...] = field(default=(), metadata={"above": 0, "maximum": 1e30})
    """Backbone only: the same in sequences of more than `rotary_short_length` tokens (LongRoPE); empty: as in all others."""
    rotary_short_length: int | None = field(default=None, metadata=up_to(2**31))
    """Backbone only: the length of sequences before the model was made fit for longer ones; None: all factors are one."""
    rotary_attention_factor: float = field(default=1.0, metadata={"above": 0, "maximum": 1000})
    """Backbone only: rotated queries and keys are multiplied by it (YaRN, LongRoPE)."""
    rotary_sections: tuple[int, ...] = field(default=(), metadata={"minimum": 1, "maximum": 2**16})
    """Backbone only: channel pairs of a head that rotate by time, row and column (M-RoPE); empty: all by the token's position."""
    has_interleaved_sections: bool = False
    """Backbone only: the three sections are interleaved pair by pair (Qwen3-VL) instead of one behind the other."""
    sliding_window: int | None = field(default=None, metadata=up_to(2**31))
    """Backbone only: in layers of kind sliding_transformer (with experts sliding_moe_transformer) tokens attend to so many,
    themselves and those before them. All layers are of this kind if no kinds are listed, but for `global_layers`."""
    global_layers: tuple[int, ...] = field(default=(), metadata={"minimum": 0, "maximum": MOST_LAYERS - 1})
    """Backbone only, with sliding_window: layers, counted from 0, whose tokens attend to all before them."""
    rotary_local_base: float | None = field(default=None, metadata={"above": 0, "maximum": 1e30})
    """Backbone only: the rotary base of sliding_transformer layers, without scaling (Gemma 3); None: that of all layers."""
    init_method_std: float = field(default=0.02, metadata={"above": 0, "maximum": 1000})
    experts: Experts | None = field(default=None, metadata=BRIEF)
    """Backbone only: the experts of layers of kind moe_transformer; all layers are of this kind if no kinds are listed."""

    @property
    def biases(self) -> dict[str, bool]:
        """The linear layers, by name, and whether each has a bias."""
        own = self.add_qkv_bias, self.add_proj_bias, self.add_mlp_bias, self.add_mlp_bias
        names = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
        return {name: self.add_bias_linear or has_bias for name, has_bias in zip(names, own, strict=True)}

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.activation in ("swiglu", "geglu_tanh", "quick_geglu")

    @property
    def expert_hidden_size(self) -> int:
        """Inner width of every expert."""
        return (self.experts.ffn_hidden_size if self.experts is not None else None) or self.ffn_hidden_size

    @property
    def head_channels(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def softmax_scale(self) -> float | None:
        """Factor of queries times keys; None: 1 / sqrt(head_channels)."""
        if self.rotary_attention_factor == 1.0 and self.query_scalar is None:
            return None
        return float((self.query_scalar or self.head_channels) ** -0.5 * self.rotary_attention_factor**2)

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads
