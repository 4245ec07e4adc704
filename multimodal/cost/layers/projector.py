"""An encoder's last layer: norm, neighbouring tokens merged into one, and an MLP to the LLM's hidden size."""

from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


class ProjectorLayer(Layer):
    """Two products with a GELU between them (Qwen2-VL's patch merger)."""

    position = "last"
    roles = (Role.ENCODER,)
    num_products = 2
    is_at_exit = True

    @property
    def num_weights(self) -> int:
        """Both matrices; 0 where no items are described."""
        if self.unit.image is None and self.unit.audio is None:
            return 0
        merged = self.unit.transformer.hidden_size * self.unit.merge_factor
        return self._inner_size * (merged + self._output_size)

    @property
    def num_vector_entries(self) -> int:
        """The norm and both biases."""
        return self.norm_vector_entries() + self._inner_size + self._output_size

    @property
    def can_be_built(self) -> bool:
        """True if items are described, by which tokens are merged."""
        return self.unit.image is not None or self.unit.audio is not None

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Norm and both products; tokens are gathered before the first, so nothing but the inner width is divided."""
        size, trains, hidden = case.bytes_per_element, case.need.trains_weights, self.unit.transformer.hidden_size
        inner = self._inner_size * (2 if trains else 1)
        whole = load.num_tokens * (self.exit_norm_bytes(case) + (size * hidden if trains else 0.0))
        return ActivationBytes(0.0, float(size * load.num_outputs * inner), whole)

    @property
    def _inner_size(self) -> int:
        return self.unit.projector_hidden_size or self.unit.transformer.hidden_size * self.unit.merge_factor

    @property
    def _output_size(self) -> int:
        return self.graph.unit(self.graph.downstream(self.unit.name)[0]).transformer.hidden_size
