"""First and last layers of encoders: patches or sound in, tokens of the LLM out."""

from collections.abc import Mapping
from typing import ClassVar

from multimodal.cost.layers.layer import (
    ActivationBytes,
    ActivationCase,
    Exchange,
    Layer,
    LayerFlops,
    LayerTraffic,
    LinearShape,
    Segment,
)
from multimodal.cost.seconds.layer_curves import Counts
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


class PatchEmbeddingLayer(Layer):
    """One linear map of the values of each patch, with all weights on every tensor parallel rank."""

    segments = (Segment("all", backward=(Exchange.GATHER,)),)
    position = "first"
    roles = (Role.ENCODER,)
    fits = staticmethod(
        lambda unit: not (unit.audio or unit.join or (unit.image and (unit.image.class_token or unit.image.position_grid)))
    )
    is_built_in = staticmethod(lambda unit: unit.image is not None)

    @property
    def num_weights(self) -> int:
        """Channels of a patch times hidden size; 0 where no image is described."""
        return self.input_values * self.unit.transformer.hidden_size if self.unit.image is not None else 0

    @property
    def num_vector_entries(self) -> int:
        """Learned positions, the bias and the norm, if there are any."""
        has_bias = self.unit.image is None or self.unit.image.has_patch_bias
        return self.unit.transformer.hidden_size * (self._num_learned + has_bias) + self.norm_vector_entries() * self._has_norm

    @property
    def _num_learned(self) -> int:
        """Hidden states that are parameters."""
        return 0

    @property
    def _has_norm(self) -> bool:
        return self.unit.image is not None and self.unit.image.has_pre_norm

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The patches, for the weight gradient, and the norm's input."""
        trains, size = case.need.trains_weights, case.bytes_per_element
        norm = self.norm_bytes(trains=trains, size=size) * self._has_norm
        return ActivationBytes(replicated=1.0 * trains * load.num_tokens * (size * self.input_values + norm))


class LearnedPatchEmbeddingLayer(PatchEmbeddingLayer):
    """Patches and class tokens of images of one size, with learned positions and perhaps a norm."""

    fits = staticmethod(lambda unit: unit.image is not None and unit.image.image_size is not None)

    @property
    def _num_learned(self) -> int:
        """Positions, class token and registers."""
        assert self.unit.image is not None, f"unit '{self.unit.name}' has no image"
        return self.unit.image.num_positions + self.unit.image.num_class_tokens


class StretchedPatchEmbeddingLayer(PatchEmbeddingLayer):
    """Patches of images of any size; their positions are interpolated from a square of learned ones."""

    fits = staticmethod(
        lambda unit: unit.image is not None and unit.image.position_grid is not None and unit.image.image_size is None
    )

    @property
    def _num_learned(self) -> int:
        """The square of positions."""
        assert self.unit.image is not None and self.unit.image.position_grid is not None
        return self.unit.image.position_grid**2

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Four positions are read, weighted and added, one after the other."""
        moved = float(bytes_per_element * self.unit.transformer.hidden_size)
        return LayerTraffic((2 + 4 * 4) * moved, (1 + 4 * 2) * moved)


class AudioEmbeddingLayer(PatchEmbeddingLayer):
    """Turns a spectrogram into hidden states, and adds positions."""

    fits = staticmethod(lambda unit: unit.audio is not None)

    num_products = 2
    is_deep = True
    # At Whisper's rate, if no other layer adds positions.
    is_built_in = staticmethod(
        lambda unit: unit.audio is not None and unit.audio.tokens_per_second == 50 and not unit.transformer.has_rotary_positions
    )

    @property
    def num_weights(self) -> int:
        """Both convolutions."""
        hidden = self.unit.transformer.hidden_size
        return 3 * hidden * (self._num_mel_bins + hidden)

    @property
    def num_vector_entries(self) -> int:
        """The bias of each convolution, and learned positions."""
        num_positions = self.unit.audio.num_positions if self.unit.audio is not None else 0
        return (2 + num_positions) * self.unit.transformer.hidden_size

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """The first convolution is computed at the three places that the second needs for a token."""
        weights = self.num_weights + 2 * 3 * self.unit.transformer.hidden_size * self._num_mel_bins
        return LayerFlops(2.0 * load.num_tokens * weights)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Inputs of both products and of both GELUs."""
        if not case.need.trains_weights:
            return ActivationBytes()
        hidden, mel = self.unit.transformer.hidden_size, self._num_mel_bins
        # The first convolution's input and output, that output with zeros around it for the second, and the second's output.
        values = 9 * mel + 3 * hidden + 3 * hidden + hidden
        return ActivationBytes(replicated=1.0 * case.bytes_per_element * load.num_tokens * values)

    @property
    def _num_mel_bins(self) -> int:
        assert self.unit.audio is not None, f"unit '{self.unit.name}' has no audio"
        return self.unit.audio.num_mel_bins


class JoinedTokensLayer(Layer):
    """Joins the outputs of other encoders in the order of tokens."""

    segments = (Segment("all", backward=(Exchange.GATHER,)),)
    position = "first"
    roles = (Role.ENCODER,)
    fits = staticmethod(lambda unit: unit.join is not None)
    num_products = 0


class ProjectorLayer(Layer):
    """Two products with a GELU between them (Qwen2-VL's patch merger); repeated for each deepstack layer."""

    segments = (Segment("all", forward=(Exchange.GATHER, Exchange.SUM), backward=(Exchange.SUM,)),)
    position = "last"
    roles = (Role.ENCODER,)
    fits = staticmethod(lambda unit: unit.has_projector and not unit.has_linear_projector and unit.queries is None)
    is_built_in = staticmethod(lambda unit: unit.is_described)  # which says how tokens are merged
    num_products = 2
    counts: ClassVar[Counts] = "leaving"

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """Both products, if items are described."""
        if not self.unit.is_described:
            return {}
        inner, count = self.unit.projector_inner_size, 1 + self._num_more
        return {
            "linear_fc1": LinearShape(self.unit.merged_size, inner, num_alike=count),
            "linear_fc2": LinearShape(inner, self._output_size, is_split_by_inputs=True, num_alike=count),
        }

    @property
    def num_vector_entries(self) -> int:
        """The norm and both biases."""
        more = self._num_more * self._merged_norm_entries
        return self._norm_entries + more + (1 + self._num_more) * (self.unit.projector_inner_size + self._output_size)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Norm and both products; tokens are gathered before the first one, so only the inner width is divided."""
        size, trains, hidden = case.bytes_per_element, case.need.trains_weights, self.unit.transformer.hidden_size
        inner = self.unit.projector_inner_size * (2 if trains else 1) * (1 + self._num_more)
        num_merged = load.num_outputs * self.unit.merged_size / hidden
        norm = self._norm_kept(load.num_tokens, num_merged, case)
        norm += self._num_more * num_merged * self.exit_norm_bytes(case)
        inputs = num_merged * size * hidden * (1 + self._num_more) if trains else 0.0
        return ActivationBytes(0.0, 1.0 * size * load.num_outputs * inner, norm + inputs)

    def _norm_kept(self, num_tokens: int, num_merged: float, case: ActivationCase) -> float:
        """Bytes of the norm of tokens; num_merged: rows of hidden_size after merging."""
        num_normalised = num_merged if self.unit.projector_norm == "merged" else num_tokens
        return num_normalised * self.exit_norm_bytes(case) if self._norm_entries else 0.0

    @property
    def _norm_entries(self) -> int:
        of_patches = self.norm_vector_entries(self.unit.projector_normalization)
        return {"patches": of_patches, "merged": self._merged_norm_entries, "none": 0}[self.unit.projector_norm]

    @property
    def _merged_norm_entries(self) -> int:
        of_patches = self.norm_vector_entries(self.unit.projector_normalization)
        return self.unit.merged_size // self.unit.transformer.hidden_size * of_patches

    @property
    def _num_more(self) -> int:
        return len(self.unit.deepstack_layers)

    @property
    def _output_size(self) -> int:
        return self.graph.projected_size(self.unit.name)


class LinearProjectorLayer(ProjectorLayer):
    """One product, with all weights on every tensor parallel rank."""

    fits = staticmethod(lambda unit: unit.has_linear_projector)

    segments = (Segment("all", forward=(Exchange.GATHER,)),)
    num_products = 1

    @property
    def num_weights(self) -> int:
        """The matrix; 0 where no items are described."""
        return self.unit.merged_size * self._output_size if self.unit.is_described else 0

    @property
    def num_vector_entries(self) -> int:
        """The norm and the bias."""
        return self._norm_entries + self._output_size

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Norm and the product's input."""
        return super().saved_bytes(load, case)._replace(split=0.0)


class MergedTokensLayer(LinearProjectorLayer):
    """No product: tokens leave the encoder merged."""

    fits = staticmethod(lambda unit: not unit.has_projector)

    num_products = num_weights = 0

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """None."""
        return {}

    @property
    def num_vector_entries(self) -> int:
        """The norm."""
        return self._norm_entries

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The norm's bytes."""
        rows = load.num_outputs * self.unit.merged_size / self.unit.transformer.hidden_size
        return ActivationBytes(replicated=self._norm_kept(load.num_tokens, rows, case))
