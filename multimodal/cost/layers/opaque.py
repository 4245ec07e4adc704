"""A module of transformers as one layer: costs as of the layers that the unit's shape describes, until they are measured."""

from multimodal.cost.layers.encoder_ends import PatchEmbeddingLayer
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer, LayerFlops, LayerTraffic
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role, Unit


class OpaqueLayer(Layer):
    """Embeds patches, and then computes as many transformer layers as the shape says."""

    position = "first"
    roles = (Role.ENCODER,)
    num_products = 4
    is_deep = True

    @classmethod
    def fits(cls, unit: Unit) -> bool:
        """True if a module is described."""
        return unit.module is not None

    @property
    def num_weights(self) -> int:
        """Those of patches and of all layers."""
        return self._embedding.num_weights + self._num_layers * self._layer.num_weights

    @property
    def num_vector_entries(self) -> int:
        """As many as these layers would have."""
        return self._embedding.num_vector_entries + self._num_layers * self._layer.num_vector_entries

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Sum over the layers. Images have one size, so that attention is linear in tokens, too."""
        image, shape = self.unit.image, self.unit.transformer
        assert image is not None
        linear = self._layer.forward_flops(load).linear
        attention = 4.0 * shape.num_attention_heads * shape.head_channels * image.grid_size**2 * load.num_tokens
        return LayerFlops(self._embedding.forward_flops(load).linear + self._num_layers * (linear + attention))

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Those of torch's layers; nothing of them is computed again."""
        kept = self._layer.saved_bytes(load, case._replace(implementation="local", recompute=None))
        return ActivationBytes(*(self._num_layers * part for part in kept))

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Sum over the layers."""
        return LayerTraffic(*(self._num_layers * part for part in self._layer.traffic(bytes_per_element)))

    @property
    def _num_layers(self) -> int:
        return self.unit.transformer.num_layers

    @property
    def _layer(self) -> Layer:
        return TransformerLayer(self.graph, self.unit, self.vocab_size)

    @property
    def _embedding(self) -> Layer:
        return PatchEmbeddingLayer(self.graph, self.unit, self.vocab_size)
