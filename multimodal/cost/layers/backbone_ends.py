"""The first and the last layers of the LLM (token embeddings; norm, output projection and loss) and of generators."""

from collections.abc import Mapping
from typing import Any

from multimodal.cost.layers.layer import (
    INDEX_BYTES,
    WIDE_BYTES,
    ActivationBytes,
    ActivationCase,
    Exchange,
    Layer,
    LayerFlops,
    LayerTraffic,
    LinearShape,
    Segment,
    read_config,
)
from multimodal.cost.layers.transformer import NUM_TIME_FEATURES
from multimodal.cost.seconds.layer_curves import Counts
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role
from multimodal.values.units.items import Latents


class TokenEmbeddingLayer(Layer):
    """A row of the vocabulary for each token; items have the encoders' outputs in their places."""

    segments = (Segment("all", forward=(Exchange.SUM,), backward=(Exchange.GATHER,)),)
    position = "first"
    roles = (Role.BACKBONE,)
    num_products = 0

    @property
    def num_weights(self) -> int:
        """Vocabulary times hidden size."""
        return self.unit.transformer.hidden_size * self.vocab_size

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """No FLOPs: a lookup."""
        return LayerFlops(0.0)

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Rows are read and written. The sums behind the first layers (deepstack: read two, write one) count here, too."""
        moved, num_added = float(bytes_per_element * self.unit.transformer.hidden_size), self.graph.num_carried(self.unit.name, 0)
        return LayerTraffic((2 + (2 + 3) * num_added) * moved, (2 + 2 * num_added) * moved)


class HeadLayer(Layer):
    """Logits of target tokens only."""

    segments = (Segment("all", forward=(Exchange.GATHER,), backward=(Exchange.SUM,)),)
    position = "last"
    roles = (Role.BACKBONE,)
    counts = "leaving"

    @property
    def num_weights(self) -> int:
        """Hidden size times vocabulary, even if the matrix is shared with the word embeddings."""
        return self.unit.transformer.hidden_size * self.vocab_size

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """The output projection, unless its matrix is that of the word embeddings."""
        own = {"output_layer": LinearShape(self.unit.transformer.hidden_size, self.vocab_size)}
        return {} if self.unit.ties_embeddings else own

    @property
    def num_vector_entries(self) -> int:
        """The norm."""
        return self.norm_vector_entries()

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The norm's bytes of all tokens; logits, inputs and indices of target tokens."""
        size = case.bytes_per_element
        logits = size * self.vocab_size
        rows = (size * self.unit.transformer.hidden_size if case.need.trains_weights else 0.0) + 2 * INDEX_BYTES
        norm = load.num_tokens * self.exit_norm_bytes(case)
        return ActivationBytes(norm, 1.0 * load.num_outputs * logits, load.num_outputs * rows)

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Logits are written and read twice (maximum, sum of exponentials); the backward reads them and writes their gradient."""
        hidden, logits = bytes_per_element * self.unit.transformer.hidden_size, WIDE_BYTES * self.vocab_size
        return LayerTraffic(float(2 * hidden + 3 * logits), float(3 * hidden + 2 * logits))


def encoding_flops(latents: Latents, *, in_channels: int) -> tuple[float, float]:
    """Return the FLOPs with which an `AutoencoderKL` encodes a pixel, and in whose attention a pair of latents takes part.

    Sizes that the folder does not give are Stable Diffusion's.
    """
    config = read_config(latents.directory)
    widths, num_blocks = config.get("block_out_channels", (128, 256, 512, 512)), config.get("layers_per_block", 2)
    before, width, made = widths[0], widths[-1], 2 * latents.channels
    weights = 9.0 * in_channels * before
    for level, inner in enumerate(widths):
        in_blocks = 9 * before * inner + (before != inner) * before * inner + (2 * num_blocks - 1) * 9 * inner**2
        weights += (in_blocks + (level < len(widths) - 1) * 9 * inner**2 / 4) / 4**level
        before = inner
    attends = config.get("mid_block_add_attention", True)
    of_latent = (36 + 4 * attends) * width**2 + 9 * width * made + config.get("use_quant_conv", True) * made**2
    return 2 * (weights + of_latent / 4 ** (len(widths) - 1)), 4.0 * width * attends


class GeneratorProjectorLayer(Layer):
    """One linear map of one row for each image, and one for each encoder's tokens; before it, images become latents."""

    segments = (Segment("all", backward=(Exchange.GATHER,)),)
    position = "first"
    roles = (Role.GENERATOR,)
    num_products = 2

    @property
    def counts(self) -> Counts:  # type: ignore[override]
        """Tokens that are given, unless patches cost something here, too."""
        return "made" if self._num_path_weights or self._encodes else "given"

    @property
    def num_weights(self) -> int:
        """The LLM's hidden size times the projector's width, for each unit that feeds it; and those behind the projector."""
        in_projector = self._num_sources * self.graph.backbone.transformer.hidden_size * self._width
        return in_projector + self._num_path_weights + self._num_embedding_weights

    @property
    def num_vector_entries(self) -> int:
        """The biases."""
        return self._num_sources * self._width

    @property
    def _width(self) -> int:
        return self.unit.transformer.hidden_size

    @property
    def _num_embedding_weights(self) -> int:
        return 0

    @property
    def _num_path_weights(self) -> int:
        sees_noise = self.unit.flow is not None and self.unit.module is None
        return self.unit.transformer.hidden_size * self.input_values if sees_noise else 0

    @property
    def _num_sources(self) -> int:
        return len(self.graph.upstream(self.unit.name))

    @property
    def _encodes(self) -> bool:
        image = self.unit.image
        return image is not None and image.latents is not None and not image.latents.is_cached

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Every row is multiplied with the weights of the unit that it comes from, every patch with those of noisy patches."""
        per_row = self.graph.backbone.transformer.hidden_size * self._width
        num_rows = load.num_tokens - load.num_outputs + load.num_sequences
        linear = 2.0 * (num_rows * per_row + load.num_outputs * self._num_path_weights)
        return LayerFlops(linear, frozen=self._encoding_flops(load) if self._encodes else 0.0)

    def _encoding_flops(self, load: UnitLoad) -> float:
        """A quadratic form of an item's patches; the last stage, which encodes again if it is another, is left out."""
        image, before = self.unit.image, self.unit.num_conditions - 1
        assert image is not None and image.latents is not None
        per_pixel, per_pair = encoding_flops(image.latents, in_channels=image.in_channels)
        per_patch, latents_of_patch = per_pixel * image.patch_size**2, (image.patch_size // image.latents.factor) ** 2
        return per_patch * load.num_outputs + per_pair * latents_of_patch**2 * pairs_of_patches(load, num_before=before)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Nothing but noisy patches is counted: the index of each patch's image takes a few bytes."""
        is_kept = self._num_path_weights > 0 and case.need.trains_weights
        return ActivationBytes(replicated=1.0 * case.bytes_per_element * load.num_outputs * self.input_values * is_kept)


def pairs_of_patches(load: UnitLoad, *, num_before: int) -> int:
    """Return the pairs of patches of the same item; num_before: conditions in front of each item's, in the load's squares."""
    return load.num_squared - 2 * num_before * load.num_outputs - num_before**2 * load.num_sequences


class DiffusionEmbeddingLayer(GeneratorProjectorLayer):
    """The same before a transformer of diffusers; FLOPs of what it embeds once an item are left out."""

    fits = staticmethod(lambda unit: unit.flow is not None and unit.flow.form is not None)

    @property
    def _config(self) -> dict[str, Any]:
        return read_config(self.unit.weights or "")

    @property
    def _is_joint(self) -> bool:
        return self.unit.flow is not None and self.unit.flow.form == "sd3"

    @property
    def _width(self) -> int:
        """The width of text, Stable Diffusion 3's where the folder is not here; a DiT has none."""
        return int(self._config.get("joint_attention_dim", 4096)) if self._is_joint else self.unit.transformer.hidden_size

    @property
    def _num_embedding_weights(self) -> int:
        """Weights that embed time, pooled text and text; a DiT's layers have theirs, the first here."""
        hidden = self.unit.transformer.hidden_size
        pooled = int(self._config.get("pooled_projection_dim", 2048))
        return (NUM_TIME_FEATURES + pooled + 2 * hidden + self._width) * hidden if self._is_joint else 0

    @property
    def num_vector_entries(self) -> int:
        """The biases of all maps: of patches, and an SD3's five."""
        return super().num_vector_entries + (6 if self._is_joint else 1) * self.unit.transformer.hidden_size


class GeneratorHeadLayer(Layer):
    """One linear map from a hidden state to the pixels of its patch, or, if no image is described, to its own width."""

    segments = (Segment("all", forward=(Exchange.GATHER,)),)
    position = "last"
    roles = (Role.GENERATOR,)
    is_built_in = staticmethod(lambda unit: unit.image is not None)
    counts = "leaving"

    @property
    def num_weights(self) -> int:
        """Hidden size times values of a patch."""
        return self.unit.transformer.hidden_size * self.input_values

    @property
    def num_vector_entries(self) -> int:
        """The norm and the bias."""
        return self.norm_vector_entries() + (self.input_values if self.unit.image is not None else 0)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The norm's bytes of all tokens; the generated values of all patches and, for the weight gradient, their inputs."""
        size, hidden = case.bytes_per_element, self.unit.transformer.hidden_size
        made = max(size, WIDE_BYTES) * self.input_values + (size * hidden if case.need.trains_weights else 0.0)
        return ActivationBytes(load.num_tokens * self.exit_norm_bytes(case), 0.0, load.num_outputs * made)


class DiffusionHeadLayer(GeneratorHeadLayer):
    """The same behind a transformer of diffusers; the map of an item's time counts as weights, but no FLOPs."""

    fits = staticmethod(lambda unit: DiffusionEmbeddingLayer.fits(unit))

    @property
    def num_weights(self) -> int:
        """Shift and scale of the norm, and the values of a patch, or with their variances twice as many (DiT)."""
        hidden = self.unit.transformer.hidden_size
        return hidden * (2 * hidden + self._num_made)

    @property
    def num_vector_entries(self) -> int:
        """The biases."""
        return 2 * self.unit.transformer.hidden_size + self._num_made

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Those of the last map."""
        return LayerFlops(2.0 * load.num_outputs * self.unit.transformer.hidden_size * self._num_made)

    @property
    def _num_made(self) -> int:
        config = read_config(self.unit.weights or "")
        channels = config.get("out_channels") or config.get("in_channels", 1)
        return self.input_values * int(channels) // int(config.get("in_channels", 1))
