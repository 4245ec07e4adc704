"""Seconds of one layer, and their parts."""

from typing import NamedTuple

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.values.backward_need import BackwardNeed


class LayerSeconds(NamedTuple):
    """Seconds of one layer over one load, on one of the ranks that share it; a full backward takes both gradients.

    B = B_input + B_weight (Cornstarch 4.2; "Bd" and "Bw" there). `BackwardNeed` decides which of them run.
    """

    forward: float
    """Including collectives inside the layer."""
    input_gradient: float
    """The whole backward except weight gradients: attention's backward, recomputation and collectives included."""
    weight_gradient: float
    forward_waiting: float = 0.0
    """Seconds of `forward` in which the rank waits for a collective inside the layer."""
    input_gradient_waiting: float = 0.0
    """Seconds of `input_gradient` in which the rank waits."""

    def backward(self, kind: str, need: BackwardNeed) -> float:
        """Return the seconds of the backward that a layer of this kind needs."""
        input_gradient = self.input_gradient if LAYER_KINDS[kind].passes_gradient(need) else 0.0
        return input_gradient + (self.weight_gradient if need.trains_weights else 0.0)


class PassParts(NamedTuple):
    """Parts of a layer's seconds."""

    attention: float
    """Core attention in a forward, without waiting."""
    waiting: float
    """Seconds in which a forward waits for tensor parallel ranks."""
    waiting_back: float
    """Seconds for which an input gradient waits, recomputation included."""
    repeats_attention: bool
    """True if the input gradient recomputes attention."""
    repeats_all: bool
    """True if the input gradient recomputes the whole forward."""
