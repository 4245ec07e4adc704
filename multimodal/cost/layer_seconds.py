"""How long one layer computes, by what its backward has to give."""

from typing import NamedTuple

from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import LayerKind


class LayerSeconds(NamedTuple):
    """Seconds of one layer over one load, on one of the ranks that share it; a full backward takes both gradients.

    B = B_input + B_weight (Cornstarch 4.2; "Bd" and "Bw" there). Which of them runs is `BackwardNeed`'s to say.
    """

    forward: float
    """Collectives inside the layer included."""
    input_gradient: float
    """Everything of the backward but weight gradients: attention's backward, recomputation and collectives included."""
    weight_gradient: float
    forward_waiting: float = 0.0
    """Share of `forward` in which the rank computes nothing because it waits for a collective inside the layer."""
    input_gradient_waiting: float = 0.0
    """The same share of `input_gradient`."""

    def backward(self, kind: LayerKind, need: BackwardNeed) -> float:
        """Seconds of the backward that the layer needs."""
        input_gradient = self.input_gradient if passes_gradient(kind, need) else 0.0
        return input_gradient + (self.weight_gradient if need.trains_weights else 0.0)


NO_SECONDS = LayerSeconds(0.0, 0.0, 0.0)
"""Of an empty load."""


def passes_gradient(kind: LayerKind, need: BackwardNeed) -> bool:
    """Whether a gradient passes through the layer.

    In a transformer layer it does even when nothing upstream is trained: only the input gradient of its first matrix is spared,
    which is not told apart here. Other layers are about one matrix deep.
    """
    return need.sends_gradient or (need.trains_weights and kind is LayerKind.TRANSFORMER)
