"""Transformer layers of a generator that learns a flow: two maps of each item's time beside attention and MLP."""

from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Exchange, LayerFlops, Segment, SegmentWork
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role

NUM_MODULATIONS = 6
"""Shift, scale and gate of two branches."""


class ModulatedTransformerLayer(TransformerLayer):
    """Attention and MLP that the time of a flow shifts, scales and gates.

    Runs as a whole; the maps of the time are products of one row an item, every tensor parallel rank's own.
    """

    roles = (Role.GENERATOR,)
    fits = staticmethod(lambda unit: unit.flow is not None)
    segments = (
        Segment(
            "all",
            forward=(Exchange.GATHER, Exchange.SUM, Exchange.GATHER),
            backward=(Exchange.GATHER_AGAIN, Exchange.SUM, Exchange.GATHER, Exchange.GATHER_AGAIN, Exchange.SUM),
            behind=Exchange.SUM,
        ),
    )

    @property
    def num_weights(self) -> int:
        """Those of a transformer layer, and of the maps of the time."""
        return super().num_weights + self._num_time_weights

    @property
    def num_vector_entries(self) -> int:
        """Those of a transformer layer, and the biases of the maps."""
        return super().num_vector_entries + (1 + NUM_MODULATIONS) * self.unit.transformer.hidden_size

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Count the maps of the time once an item."""
        found = super().forward_flops(load)
        extra = 2.0 * (load.num_sequences - load.num_tokens) * self._num_time_weights
        return found._replace(linear=found.linear + extra)

    def segment_work(self, bytes_per_element: int) -> tuple[SegmentWork, ...]:
        """Return the work of the one segment: the maps of the time, once an item, are left out."""
        parts = super().segment_work(bytes_per_element)
        traffic = sum(each.traffic[0] for each in parts), sum(each.traffic[1] for each in parts)
        return (SegmentWork(sum(each.num_weights for each in parts), traffic, attends=True),)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """With shift, scale and gate of every token, and, for these, the normalised inputs and outputs of both branches."""
        kept = super().saved_bytes(load, case)
        if case.recompute == "full":
            return kept
        hidden_bytes = case.bytes_per_element * self.unit.transformer.hidden_size
        return kept._replace(whole=kept.whole + 10.0 * hidden_bytes * load.num_tokens)

    @property
    def _num_time_weights(self) -> int:
        return (1 + NUM_MODULATIONS) * self.unit.transformer.hidden_size**2
