"""A generator's first layer: the LLM's hidden state of each image, mapped to the generator's hidden size."""

from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer, LayerFlops
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role


class GeneratorProjectorLayer(Layer):
    """One linear map of one row for each image: as good as nothing beside the layers that follow."""

    position = "first"
    roles = (Role.GENERATOR,)
    num_products = 2

    @property
    def num_weights(self) -> int:
        """The LLM's hidden size times the generator's."""
        source = self.graph.unit(self.graph.upstream(self.unit.name)[0])
        return source.transformer.hidden_size * self.unit.transformer.hidden_size

    @property
    def num_vector_entries(self) -> int:
        """The bias."""
        return self.unit.transformer.hidden_size

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """No FLOPs depend on tokens."""
        return LayerFlops(0.0)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Nothing is counted: the index of each patch's image takes a few bytes."""
        return ActivationBytes()
