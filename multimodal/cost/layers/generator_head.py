"""A generator's last layer: norm, the values of each patch, and their squared error."""

from multimodal.cost.layers.layer import WIDE_BYTES, ActivationBytes, ActivationCase, Layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


class GeneratorHeadLayer(Layer):
    """One linear map from a hidden state to the pixels of its patch, or, where no image is described, to its own width."""

    position = "last"
    roles = (Role.GENERATOR,)
    is_at_exit = True

    @property
    def num_weights(self) -> int:
        """Hidden size times values of a patch."""
        return self.unit.transformer.hidden_size * self.input_values

    @property
    def num_vector_entries(self) -> int:
        """The norm and the bias."""
        return self.norm_vector_entries() + (self.input_values if self.unit.image is not None else 0)

    @property
    def can_be_built(self) -> bool:
        """True if an image is described."""
        return self.unit.image is not None

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The norm's bytes, the values made, and for the weight gradient their inputs, of all tokens."""
        size, hidden = case.bytes_per_element, self.unit.transformer.hidden_size
        made = max(size, WIDE_BYTES) * self.input_values + (size * hidden if case.need.trains_weights else 0.0)
        return ActivationBytes(load.num_tokens * self.exit_norm_bytes(case), 0.0, load.num_tokens * made)
