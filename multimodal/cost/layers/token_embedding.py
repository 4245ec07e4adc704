"""The LLM's first layer: looking token ids up."""

from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer, LayerFlops
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


class TokenEmbeddingLayer(Layer):
    """A row of the vocabulary for each token, with the encoders' outputs in the places of their items."""

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

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Nothing is counted: token ids take a few bytes."""
        return ActivationBytes()
