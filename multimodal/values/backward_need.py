"""The gradients that a stage must compute, decided once for cost model, builder and executor.

A frozen module needs no weight gradients, but its input gradient is still needed when something trainable lies upstream
(Cornstarch 4.2: a frozen LLM behind a trainable projector runs an input-gradient-only backward, a frozen encoder none).
"""

from enum import StrEnum

from multimodal.values.model_graph import ModelGraph


class BackwardNeed(StrEnum):
    """The gradients that the backward of a stage computes."""

    NONE = "none"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    """Weight gradients only: nothing upstream is trained."""
    FULL = "full"

    @property
    def has_backward(self) -> bool:
        """True if the stage has a backward at all."""
        return self is not BackwardNeed.NONE

    @property
    def trains_weights(self) -> bool:
        """True if the stage has weight gradients."""
        return self in (BackwardNeed.WEIGHT_GRADIENT, BackwardNeed.FULL)

    @property
    def sends_gradient(self) -> bool:
        """True if the stage must send a gradient to the stages upstream of it."""
        return self in (BackwardNeed.INPUT_GRADIENT, BackwardNeed.FULL)


def layers_backward_need(graph: ModelGraph, unit: str, layers: range) -> BackwardNeed:
    """Return the gradients that the backward of a range of a unit's layers must compute."""
    is_trainable = graph.unit(unit).is_trainable
    upstream = any(map(is_trainable, range(layers.start))) or any(
        has_trainable_output(graph, source) for source in graph.upstream(unit)
    )
    if any(map(is_trainable, layers)):
        return BackwardNeed.FULL if upstream else BackwardNeed.WEIGHT_GRADIENT
    return BackwardNeed.INPUT_GRADIENT if upstream else BackwardNeed.NONE


def unit_is_trainable(graph: ModelGraph, unit: str) -> bool:
    """Return True if any layer of the unit is trained."""
    return any(map(graph.unit(unit).is_trainable, range(len(graph.unit(unit).layers))))


def has_trainable_output(graph: ModelGraph, unit: str) -> bool:
    """Return True if a gradient must flow back into this unit's output."""
    return unit_is_trainable(graph, unit) or any(has_trainable_output(graph, source) for source in graph.upstream(unit))
