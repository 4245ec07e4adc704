"""An encoder's first layer for images: one linear map from a patch's pixels to a hidden state."""

from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role, Unit


class PatchEmbeddingLayer(Layer):
    """Whole on every tensor parallel rank."""

    position = "first"
    roles = (Role.ENCODER,)

    @classmethod
    def fits(cls, unit: Unit) -> bool:
        """True if the unit takes images."""
        return unit.audio is None

    @property
    def num_weights(self) -> int:
        """Channels of a patch times hidden size; 0 where no image is described."""
        return self.input_values * self.unit.transformer.hidden_size if self.unit.image is not None else 0

    @property
    def num_vector_entries(self) -> int:
        """The bias."""
        return self.unit.transformer.hidden_size

    @property
    def can_be_built(self) -> bool:
        """True if an image is described."""
        return self.unit.image is not None

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The patches, for the weight gradient."""
        trains = case.need.trains_weights
        return ActivationBytes(replicated=float(case.bytes_per_element * load.num_tokens * self.input_values if trains else 0))
