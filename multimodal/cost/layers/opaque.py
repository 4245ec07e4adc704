"""A module of transformers as one layer, at the costs of the layers in the unit's shape until it is measured."""

import math

from multimodal.cost.layers.backbone_ends import pairs_of_patches
from multimodal.cost.layers.encoder_ends import AudioEmbeddingLayer, PatchEmbeddingLayer
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer, LayerFlops, LayerTraffic
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role
from multimodal.values.units.items import Waveform
from multimodal.values.units.unit import Opaque


class _WaveformLayer(PatchEmbeddingLayer):
    """Convolutions over samples, and a product that gives the hidden size."""

    @property
    def num_weights(self) -> int:
        """Weights of all convolutions, the first of which has one input channel, and of the product."""
        return sum(self._weights) + self._waveform.channels * self.unit.transformer.hidden_size

    @property
    def num_vector_entries(self) -> int:
        """One bias or norm for each convolution."""
        return len(self._weights) * self._waveform.channels

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """A convolution computes as many outputs for a token as the product of the later convolutions' strides."""
        steps = self._waveform.steps
        times = (math.prod(steps[index + 1 :]) for index in range(len(steps)))
        convolutions = sum(weights * count for weights, count in zip(self._weights, times, strict=True))
        return LayerFlops(2.0 * load.num_tokens * (convolutions + self._waveform.channels * self.unit.transformer.hidden_size))

    @property
    def _waveform(self) -> Waveform:
        assert self.unit.audio is not None and self.unit.audio.waveform is not None
        return self.unit.audio.waveform

    @property
    def _weights(self) -> list[int]:
        sizes = (1, *[self._waveform.channels] * len(self._waveform.widths))
        return [size * width * self._waveform.channels for size, width in zip(sizes, self._waveform.widths, strict=False)]


class OpaqueLayer(Layer):
    """Embeds patches or sound, then computes the number of transformer layers that the shape gives."""

    position = "first"
    roles = (Role.ENCODER,)
    fits = staticmethod(lambda unit: unit.module is not None)
    num_products = 4
    is_deep = True

    @property
    def num_weights(self) -> int:
        """Weights of the embedding of patches or sound, and of all layers."""
        return self._embedding.num_weights + self.unit.transformer.num_layers * self._layer.num_weights

    @property
    def num_vector_entries(self) -> int:
        """Sum over the embedding and all layers."""
        return self._embedding.num_vector_entries + self.unit.transformer.num_layers * self._layer.num_vector_entries

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Sum over the layers. Images have one size, so attention is linear in tokens, too."""
        image, load = self.unit.image, self._padded(load)
        embedding, layer = self._embedding.forward_flops(load), self._layer.forward_flops(load)
        shape, num_layers = self.unit.transformer, self.unit.transformer.num_layers
        if image is None or image.image_size is None:
            return LayerFlops(embedding.linear + num_layers * layer.linear, num_layers * layer.attention)
        attention = 4.0 * shape.num_attention_heads * shape.head_channels * image.grid_size**2 * load.num_tokens
        return LayerFlops(embedding.linear + num_layers * (layer.linear + attention))

    def _padded(self, load: UnitLoad) -> UnitLoad:
        """Return the load that is computed: modules that take spectrograms take them in a single length."""
        audio = self.unit.audio
        if audio is None or audio.waveform is not None:
            return load
        most = audio.max_tokens
        return load._replace(num_tokens=load.num_sequences * most, num_squared=load.num_sequences * most**2)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """The bytes of torch's layers without recomputation."""
        kept = self._layer.saved_bytes(self._padded(load), case._replace(implementation="local", recompute=None))
        return ActivationBytes(*(self.unit.transformer.num_layers * part for part in kept))

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Sum over the layers."""
        return LayerTraffic(*(self.unit.transformer.num_layers * part for part in self._layer.traffic(bytes_per_element)))

    @property
    def _layer(self) -> Layer:
        return TransformerLayer(self.graph, self.unit, self.vocab_size)

    @property
    def _embedding(self) -> Layer:
        audio = self.unit.audio
        kind = PatchEmbeddingLayer if audio is None else _WaveformLayer if audio.waveform is not None else AudioEmbeddingLayer
        return kind(self.graph, self.unit, self.vocab_size)


class DenoiserLayer(OpaqueLayer):
    """The same as a generator's last layer; operations and weights are those that were counted, if the model file has them."""

    position = "last"  # type: ignore[assignment]
    roles = (Role.GENERATOR,)
    counts = "made"

    @property
    def num_weights(self) -> int:
        """Those that were counted, vectors among them, or those of the unit's shape."""
        return self._module.num_weights or super().num_weights

    @property
    def num_vector_entries(self) -> int:
        """Those of the unit's shape, if none were counted."""
        return 0 if self._module.num_weights else super().num_vector_entries

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """A quadratic form of an item's patches, without the conditions before them."""
        if self._module.operations is None:
            return super().forward_flops(load)
        of_item, of_patch, of_pair = self._module.operations
        linear = of_item * load.num_sequences + of_patch * load.num_outputs
        return LayerFlops(linear, of_pair * pairs_of_patches(load, num_before=self.unit.num_conditions - 1))

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Those that were counted, if the model file has them: also of patches and pairs of them."""
        if self._module.kept_values is None:
            return super().saved_bytes(load, case)
        of_item, of_patch, of_pair = self._module.kept_values
        num_pairs = pairs_of_patches(load, num_before=self.unit.num_conditions - 1)
        kept = of_item * load.num_sequences + of_patch * load.num_outputs + of_pair * num_pairs
        return ActivationBytes(replicated=case.bytes_per_element * kept)

    @property
    def _module(self) -> Opaque:
        assert self.unit.module is not None
        return self.unit.module
