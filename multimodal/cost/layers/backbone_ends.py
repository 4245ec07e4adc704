"""The first and the last layers of the LLM (token embeddings; norm, output projection and loss) and of generators."""

from collections.abc import Mapping

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
)
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


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


class GeneratorProjectorLayer(Layer):
    """One linear map of one row for each image, and one for each encoder's tokens."""

    segments = (Segment("all", backward=(Exchange.GATHER,)),)
    position = "first"
    roles = (Role.GENERATOR,)
    num_products = 2
    counts = "given"

    @property
    def num_weights(self) -> int:
        """The LLM's hidden size times the generator's, for each unit that feeds it; and the map of noisy patches."""
        hidden = self.unit.transformer.hidden_size
        return self._num_sources * self.graph.backbone.transformer.hidden_size * hidden + self._num_path_weights

    @property
    def num_vector_entries(self) -> int:
        """The biases."""
        return self._num_sources * self.unit.transformer.hidden_size

    @property
    def _num_path_weights(self) -> int:
        sees_noise = self.unit.flow is not None and self.unit.module is None
        return self.unit.transformer.hidden_size * self.input_values if sees_noise else 0

    @property
    def _num_sources(self) -> int:
        return len(self.graph.upstream(self.unit.name))

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Every row is multiplied with the weights of the unit that it comes from, every patch with those of noisy patches."""
        per_row = (self.num_weights - self._num_path_weights) / self._num_sources
        return LayerFlops(2.0 * (self._num_counted(load) * per_row + load.num_outputs * self._num_path_weights))

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Nothing but noisy patches is counted: the index of each patch's image takes a few bytes."""
        is_kept = self._num_path_weights > 0 and case.need.trains_weights
        return ActivationBytes(replicated=1.0 * case.bytes_per_element * load.num_outputs * self.input_values * is_kept)


class DiffusionEmbeddingLayer(GeneratorProjectorLayer):
    """The same before a transformer of diffusers; what it embeds once an item is left out."""

    fits = staticmethod(lambda unit: unit.flow is not None and unit.flow.form is not None)


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
    """The same behind a transformer of diffusers."""

    fits = staticmethod(lambda unit: DiffusionEmbeddingLayer.fits(unit))
