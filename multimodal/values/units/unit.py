"""A unit: one module of the model graph, with its layers, its input, and what may stand in for parts of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

from multimodal.values.typed_reader import BRIEF, Plain, up_to
from multimodal.values.units.items import AudioInput, Grid, ImageInput, ItemInput
from multimodal.values.units.transformer import Transformer


class Role(StrEnum):
    """The role of a unit in the graph."""

    ENCODER = "encoder"
    BACKBONE = "backbone"
    GENERATOR = "generator"


NEW_ROWS = "new_rows"
"""The parameter with what is added to rows of a frozen matrix of the vocabulary."""


@dataclass(frozen=True)
class Lora:
    """Adapters add alpha / rank x B A x to the products W x of some frozen matrices W; A and B are trained."""

    rank: int = field(metadata=up_to(2**14))
    """Rows of A, [rank, inputs], and columns of B, [outputs, rank]."""
    alpha: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """None: equal to rank, so that B A is added without a factor."""
    targets: tuple[str, ...] = field(default=("*",), metadata={"min_entries": 1})
    """The linear layers, as `<kind of layer>.<module>`. A model file may contain patterns, which its reader resolves."""

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def modules(self, kind: str) -> tuple[str, ...]:
        """Return the linear layers that are adapted in a layer of this kind."""
        return tuple(module for owner, _, module in (target.partition(".") for target in self.targets) if owner == kind)


@dataclass(frozen=True)
class Opaque:
    """An unchanged module of Hugging Face's transformers in place of an encoder's layers, or of diffusers in a generator's.

    It counts as one layer: no plan cuts it, and its backward is one piece.
    """

    directory: str
    """The folder with the config.json that it is built from, relative to the model file if in one. Nothing in it is executed."""
    class_name: str | None = field(default=None, metadata={**BRIEF, "key": "class"})
    """A class of transformers, such as CLIPVisionModel; None: the class that AutoModel chooses for config.json."""
    part: str | None = field(default=None, metadata=BRIEF)
    """The submodule to take, such as `vision_model`; None: all of it."""
    before_encoder: str | None = field(default=None, metadata=BRIEF)
    """A function `package.module:function` of the images, [num_images, channels, height, width], or of one clip, [1, samples] or
    [1, num_mel_bins, frames], that returns the module's input. Runs import it only if that is allowed."""
    after_encoder: str | None = field(default=None, metadata=BRIEF)
    """The same for the module's hidden states, [num_images, num_tokens, hidden_size]; the last tokens of its result must be the
    patches, or the first ones those of the clip."""
    after_projector: str | None = field(default=None, metadata=BRIEF)
    """The same for the projector's output, [num_tokens, hidden_size of the LLM]."""

    operations: tuple[float, ...] | None = field(default=None, metadata={**BRIEF, "minimum": 0, "min_entries": 3})
    """Of generators, as `tools/profile_layers.py --count-operations` finds them: c, a and b, so that a forward of an item of n
    patches takes c + a n + b n^2 FLOPs; None: those of the layers in the unit's shape."""
    num_weights: int | None = field(default=None, metadata={**BRIEF, **up_to(2**40)})
    """Of generators, found together with these."""
    kept_values: tuple[float, ...] | None = field(default=None, metadata={**BRIEF, "minimum": 0, "min_entries": 3})
    """The same of the numbers that its forward keeps for the backward, also found with these; None: those of the layers."""

    @property
    def callbacks(self) -> tuple[str, ...]:
        """The names of all callbacks that are set."""
        return tuple(each for each in (self.before_encoder, self.after_encoder, self.after_projector) if each is not None)


@dataclass(frozen=True)
class Queries:
    """A projector of cross-attention: every item leaves as many tokens as there are learned queries, whatever its size.

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


@dataclass(frozen=True)
class Flow:
    """A generator that learns the velocity, noise - data, at (1 - t) data + t noise of its items (rectified flow).

    Stable Diffusion 3, section 2; the layers between its ends are DiT's, which an item's time t modulates.
    """

    condition_tokens: int = field(default=1, metadata=up_to(2**16))
    """The LLM's last tokens, up to the one that opens an item, whose hidden states condition it."""
    condition_dropout: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1})
    """Share of items that are learnt without conditions, so that sampling can be guided (classifier-free guidance)."""
    has_joint_attention: bool = False
    """Conditions have weights of their own in every layer, and attend together with the patches (MMDiT: Stable Diffusion 3,
    section 4); False: they are tokens like the patches."""
    form: Literal["sd3", "dit"] | None = None
    """The unit's `weights` are the folder of a diffusers SD3Transformer2DModel or DiTTransformer2DModel, whose embeddings,
    modulation and head are around the unit's layers; None: Braid's own."""
    prediction: Literal["velocity", "epsilon", "v"] = "velocity"
    """The value that is learnt: noise - data of a rectified flow, or with the 1000 steps of DDPM the noise (epsilon), or v."""
    beta_start: float = field(default=0.00085, metadata={"above": 0, "below": 1})
    """DDPM's first and last beta."""
    beta_end: float = field(default=0.012, metadata={"above": 0, "below": 1})
    beta_schedule: Literal["scaled_linear", "linear"] = "scaled_linear"
    """The roots of betas are evenly spaced (Stable Diffusion), or the betas themselves (DiT)."""

    @property
    def num_streams(self) -> int:
        """Number of sets of weights in a layer."""
        return 2 if self.has_joint_attention else 1

    @property
    def num_carried(self) -> int:
        """Number of embeddings of time and condition that every layer is given beside hidden states."""
        return 0 if self.form is None else 1 if self.form == "sd3" else 2


_OF_BACKBONES = "vocab_size", "untie_embeddings_and_output_weights", "has_exact_vocabulary", "new_tokens"
_OF_PROJECTORS = (
    *("has_linear_projector", "has_projector", "projector_hidden_size", "projector_norm", "projector_norm_epsilon"),
    *("projector_normalization", "queries", "join"),
)
_ENDS = {
    Role.ENCODER: ("patch_embedding", "projector"),
    Role.BACKBONE: ("token_embedding", "head"),
    Role.GENERATOR: ("generator_projector", "generator_head"),
}
"""Kinds of the first and the last layer."""
MOE_KINDS = "moe_transformer", "sliding_moe_transformer"
"""Kinds of the layers that have experts: those whose tokens attend to all before them, and those with a sliding window."""


@dataclass(frozen=True)
class Unit:
    """One module of the model graph with its own parallelism."""

    name: str
    role: Role
    transformer: Transformer = field(metadata={"inline": True})
    image: ImageInput | None = field(default=None, metadata=BRIEF)
    """The images that an encoder takes, or that a generator makes, which may be spectrograms of sound."""
    audio: AudioInput | None = field(default=None, metadata=BRIEF)
    """The sound that an encoder takes, in place of images."""
    projector_hidden_size: int | None = field(default=None, metadata=up_to(2**24))
    """Encoders only; None: hidden_size x merge_factor."""
    has_linear_projector: bool = False
    """Encoders only: a projector is one product, instead of two with a GELU between them."""
    projector_norm: Literal["patches", "merged", "none"] = "patches"
    """Encoders only: the norm before the projector's first product: over every patch, or over the patches that are merged."""
    projector_normalization: Literal["LayerNorm", "RMSNorm"] | None = field(default=None, metadata=BRIEF)
    """Encoders only: the kind of that norm; None: `normalization`."""
    projector_norm_epsilon: float | None = field(default=None, metadata={**BRIEF, "above": 0, "maximum": 1})
    """Encoders only; None: layernorm_epsilon."""
    join: Literal["features", "sequence"] | None = field(default=None, metadata=BRIEF)
    """For encoders that other encoders feed instead of images or sound: the inputs of an item are concatenated by channels
    (features) or by tokens (sequence)."""
    has_projector: bool = True
    """Encoders that feed other encoders only. False: their tokens leave normalised and merged, but not projected."""
    queries: Queries | None = field(default=None, metadata=BRIEF)
    """Encoders only: the projector is cross-attention of learned queries; None: it maps tokens, or merged tokens, one by one."""
    flow: Flow | None = field(default=None, metadata=BRIEF)
    """Generators only; None: it learns the items themselves, by squared error."""
    untie_embeddings_and_output_weights: bool = True
    """Backbone only."""
    vocab_size: int | None = field(default=None, metadata={**BRIEF, **up_to(2**31)})
    """Backbone only: the vocabulary size if no tokenizer gives it; a run uses its tokenizer's."""
    has_exact_vocabulary: bool = False
    """Backbone only. True: the vocabulary has `vocab_size` tokens (or the tokenizer's, if more), and rows that pad it have no
    logits, as in models of Hugging Face. False: padded rows count in the softmax, as in Megatron."""
    freeze_module: bool = False
    freeze_projector: bool = False
    """Freezes the projector: the last layer of encoders, the first layer of generators."""
    lora: Lora | None = field(default=None, metadata=BRIEF)
    """Adapters of linear layers of the module, and of the projector if they are named. All other weights of the module are then
    frozen, and those of a projector that has adapters."""
    new_tokens: tuple[int, ...] | None = field(default=None, metadata={**BRIEF, "minimum": 0})
    """Backbone only: the first of the tokens that training adds to the vocabulary, and the one behind the last. Their rows of the
    embeddings and of the output projection are trained where these are frozen, too."""
    module: Opaque | None = field(default=None, metadata=BRIEF)
    """Encoders of images of one size, or of sound: a module of transformers in place of all layers but the projector. Generators
    with a flow: one of diffusers, whose cross-attention is as wide as `hidden_size`.
    Until its cost is measured, it is estimated from `num_layers` and the rest of the shape."""
    weights: str | None = field(default=None, metadata=BRIEF)
    """A Hugging Face folder that initialises the unit, except for its projector; relative to the model file if in one."""
    layer_kinds: tuple[str, ...] | None = field(default=None, metadata={**BRIEF, "key": "layers"})
    """Kind of every layer, first to last, `num_layers` of them between the two ends; None: transformer layers between the ends of
    the role (encoders of images of one size learn positions). The kinds are those of multimodal/cost/layers."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The kinds of the unit's layers, in order; stages are ranges of this list."""
        first, last = _ENDS[self.role]
        if self.audio is not None:
            first = "audio_embedding"
        if self.role is Role.ENCODER and self.image is not None and self.image.position_grid is not None:
            first = "stretched_patch_embedding"
        if self.role is Role.ENCODER and self.image is not None and self.image.image_size is not None:
            first = "learned_patch_embedding"
        if self.join is not None:
            first = "joined_tokens"
        if self.has_linear_projector:
            last = "linear_projector"
        if not self.has_projector:
            last = "merged_tokens"
        if self.queries is not None:
            last = "query_projector"
        if self.flow is not None and self.flow.form is not None:
            first, last = "diffusion_embedding", "diffusion_head"
        if self.module is not None:
            return ("opaque", last) if self.role is Role.ENCODER else (first, "denoiser")
        has_experts = self.transformer.experts is not None
        plain = "transformer" if self.flow is None else "modulated_transformer"
        body = [MOE_KINDS[0] if has_experts else plain] * self.transformer.num_layers
        if self.has_windows:
            full = self.image.full_attention_layers if self.image is not None else ()
            body = ["transformer" if index in full else "windowed_transformer" for index in range(len(body))]
        if self.transformer.sliding_window is not None:
            full = self.transformer.global_layers
            sliding = MOE_KINDS[1] if has_experts else "sliding_transformer"
            body = [kind if index in full else sliding for index, kind in enumerate(body)]
        return self.layer_kinds or (first, *body, last)

    @property
    def item_input(self) -> ItemInput | None:
        """The description of the items that an encoder takes or a generator makes; None if the model file has none."""
        return self.audio or self.image

    @property
    def makes_sound(self) -> bool:
        """True for a generator of sound."""
        return self.image is not None and self.image.num_mel_bins is not None

    @property
    def inner_layers(self) -> tuple[str, ...]:
        """Kinds of the layers that pipeline stages share out: all but the two ends, or a module of transformers as one layer."""
        return self.layers[1:-1] or (self.layers[1:] if self.role is Role.GENERATOR else self.layers[:1])

    @property
    def num_inner_layers(self) -> int:
        """Number of inner layers."""
        return len(self.inner_layers)

    @property
    def has_windows(self) -> bool:
        """True if tokens of an encoder's items attend inside windows or chunks."""
        return self.role is Role.ENCODER and self.item_input is not None and self.item_input.tokens_per_window is not None

    @property
    def window_everywhere(self) -> int | None:
        """The sliding window that bounds attention in all layers of the backbone; None if some attend to all tokens before."""
        return None if {"transformer", MOE_KINDS[0]} & {*self.layers} else self.transformer.sliding_window

    @property
    def keeps_items_whole(self) -> bool:
        """True if context parallel ranks do not cut an encoder's items.

        An item must be whole where windows are made, where rows get ends, and where tokens are merged beside a class token or in
        a clip with a remainder. Queries attend to all of an item.
        """
        if self.has_windows or self.queries is not None or bool(self.image and self.image.has_row_ends):
            return True
        return self.merge_factor > 1 and (self.audio is not None or bool(self.image and self.image.class_token))

    @property
    def is_causal(self) -> bool:
        """True if a token attends only to earlier tokens; in other units an item attends to all of itself."""
        return self.role is Role.BACKBONE

    @property
    def ties_embeddings(self) -> bool:
        """True if the last layer uses the word embeddings of the first one as its weights."""
        return self.role is Role.BACKBONE and not self.untie_embeddings_and_output_weights

    def num_tokens_known(self, padded: int) -> int:
        """Number of tokens of the vocabulary that have logits; padded: rows of the padded vocabulary."""
        exact = self.vocab_size if self.has_exact_vocabulary else None
        return min(exact or padded, padded)

    @property
    def merge_factor(self) -> int:
        """Neighbouring tokens that leave an encoder's projector as one."""
        return self.item_input.merge_factor if self.item_input is not None else 1

    @property
    def merged_size(self) -> int:
        """Input width of an encoder's projector: that of merged tokens side by side, or of one token."""
        is_averaged = self.audio is not None and self.audio.merge == "averaged"
        return self.transformer.hidden_size * (1 if is_averaged else self.merge_factor)

    @property
    def projector_inner_size(self) -> int:
        """Width between the two products of an encoder's projector."""
        return self.projector_hidden_size or self.merged_size

    def num_output_tokens(self, grid: Grid) -> int:
        """Number of tokens that leave an encoder for an item with this grid, with those that end rows in the LLM."""
        assert self.item_input is not None, f"unit '{self.name}' takes no items"
        return self.item_input.num_output_tokens(grid) if self.queries is None else self.queries.num_queries

    def num_outputs(self, num_tokens: int) -> int:
        """Number of tokens that leave an encoder for an item with this many tokens inside."""
        return self.num_merged_tokens(num_tokens) if self.queries is None else self.queries.num_queries

    @property
    def is_described(self) -> bool:
        """True if the model file describes the unit's input or output."""
        return self.item_input is not None or self.join is not None

    @property
    def divided_widths(self) -> Mapping[str, int]:
        """Widths that the tensor parallel size must divide, by name."""
        shape = self.transformer
        own = {
            "num_attention_heads": shape.num_attention_heads,
            "num_query_groups": shape.query_groups,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "ffn_hidden_size of experts": shape.expert_hidden_size,
            "shared_expert_intermediate_size": (shape.experts and shape.experts.shared_expert_intermediate_size) or 0,
        }
        if shape.qk_norm_spans_heads:
            own["norms of queries and keys over all heads"] = 1
        if self.layers[-1] == "projector":
            own["projector_hidden_size"] = self.projector_inner_size
        if self.queries is None:
            return own
        of_queries = self.queries.shape(shape)
        heads, inner = "num_attention_heads of queries", "ffn_hidden_size of queries"
        return {**own, heads: of_queries.num_attention_heads, inner: of_queries.ffn_hidden_size}

    def num_merged_tokens(self, num_tokens: int) -> int:
        """Number of tokens after the merging of neighbours, of an item with this many tokens inside the encoder."""
        is_dropped = self.image is not None and self.image.class_token == "dropped"
        num_dropped = self.image.num_class_tokens if self.image is not None and is_dropped else 0
        return (num_tokens - num_dropped) // self.merge_factor

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Transformer layers of an encoder, counted from 0, whose output also goes to the LLM."""
        return self.image.deepstack_layers if self.role is Role.ENCODER and self.image is not None else ()

    def is_trainable(self, layer_index: int) -> bool:
        """True if any of this layer's parameters are trained."""
        added = self.adapted_modules(layer_index) or self.new_rows(self.layers[layer_index])
        return self.trains_weights(layer_index) or bool(added)

    @property
    def projector_layer(self) -> int | None:
        """The index of the projector, or of what is in its place; None for the backbone."""
        return {Role.ENCODER: len(self.layers) - 1, Role.GENERATOR: 0}.get(self.role)

    def trains_weights(self, layer_index: int) -> bool:
        """True if this layer's own weights are trained, rather than adapters of them."""
        projector = self.projector_layer
        if self.join is not None and layer_index == 0:
            return False  # there are none
        if layer_index == projector and not self.has_projector:
            return self.projector_norm != "none" and not self.freeze_module and self.lora is None
        if layer_index == projector:
            return not (self.freeze_projector or self.adapted_modules(layer_index))
        return not self.freeze_module and self.lora is None

    @property
    def needs_local_layers(self) -> bool:
        """True if layers are megatron-core's own: they have norms behind their branches or without weights, or two streams."""
        has_own = self.flow is not None and (self.flow.has_joint_attention or self.flow.form is not None)
        return self.transformer.has_post_norms or has_own

    @property
    def num_conditions(self) -> int:
        """Rows that the LLM hands to a generator for each of its items."""
        return 1 if self.flow is None else self.flow.condition_tokens

    def adapted_modules(self, layer_index: int) -> tuple[str, ...]:
        """Return the linear layers of this layer that have adapters."""
        return self.lora.modules(self.layers[layer_index]) if self.lora is not None else ()

    def new_rows(self, kind: str) -> range:
        """Return the tokens whose rows of a vocabulary's matrix are trained though it is frozen; kind: of the layer that has it.

        An output projection with an adapter learns by that.
        """
        is_adapted = self.lora is not None and bool(self.lora.modules(kind))
        if self.new_tokens is None or kind not in _ENDS[Role.BACKBONE] or is_adapted or self.trains_weights(0):
            return range(0)
        return range(*self.new_tokens)


def unit_from_plain(name: str, entry: Plain) -> Unit:
    """Build from the plain form; raises ModelError naming the offending place."""
    unit = entry.build(Unit, name=name)
    is_encoder = unit.role is Role.ENCODER
    if is_encoder and unit.audio is not None and unit.image is not None:
        entry.fail("has an image and audio; an encoder takes one kind of item, so make it two units")
    plain = Unit(name, unit.role, unit.transformer)
    also = ("image", "freeze_projector") if unit.role is Role.BACKBONE else ()
    for role, owner, keys in (
        (Role.BACKBONE, "the backbone", _OF_BACKBONES),
        (Role.GENERATOR, "generators", ("flow",)),
        (Role.ENCODER, "encoders", (*_OF_PROJECTORS, "audio", *also)),
    ):
        for key in keys if unit.role is not role else ():
            if getattr(unit, key) != getattr(plain, key):
                entry.inner(key, None, where=entry.where).fail(f"{key} belongs to {owner}; remove it here")
    return replace(unit, image=ImageInput()) if is_encoder and not unit.is_described else unit
