"""What one layer costs as curves over tokens: the form of both the analytic model and a profile."""

from typing import NamedTuple

from multimodal.cost.interpolated import Interpolated
from multimodal.cost.layer_flops import UnitLoad
from multimodal.cost.quadratic import Quadratic
from multimodal.values.model_graph import LayerKind, Role

Curve = Quadratic | Interpolated
"""Answers `at(num_tokens, num_squared, num_sequences)`: seconds of packed sequences, given the sum of their squared lengths."""


class LayerCurves(NamedTuple):
    """Seconds of one rank's computations, without collectives and without recomputation."""

    forward: Curve
    input_gradient: Curve
    weight_gradient: Curve
    attention: Curve = Quadratic()
    """Contained in `forward`: core attention, which selective recomputation runs again."""

    def shared(self, factor: float) -> "LayerCurves":
        """The same work times `factor`."""
        return LayerCurves(*(curve.shared(factor) for curve in self))


def leaves_unit(role: Role, kind: LayerKind) -> bool:
    """Whether a layer's cost depends on the tokens that leave the unit, and not on those inside it."""
    return kind is LayerKind.HEAD or (kind is LayerKind.PROJECTOR and role is Role.ENCODER)


def counted_tokens(load: UnitLoad, *, at_exit: bool) -> tuple[int, int, int]:
    """Tokens, sum of squares and sequences that a layer's cost depends on; at_exit: see `leaves_unit`."""
    num_tokens, num_squared, num_outputs, num_sequences = load
    return (num_outputs, num_outputs * num_outputs, num_sequences) if at_exit else (num_tokens, num_squared, num_sequences)
