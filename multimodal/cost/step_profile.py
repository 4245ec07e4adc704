"""What a step was measured to take beside its layers: the runtime's own work, and the optimizer's."""

from dataclasses import asdict, dataclass, field

_SECONDS = {"minimum": 0, "maximum": 1e9}


@dataclass(frozen=True)
class StepProfile:
    """Seconds of one rank."""

    seconds: float = field(default=0.0, metadata=_SECONDS)
    """Of every step, however much it computes: clearing gradients, starting, summing up."""
    computation_seconds: float = field(default=0.0, metadata=_SECONDS)
    """Of every forward and every backward: finding its inputs, handing on its outputs."""
    unit_update_seconds: float = field(default=0.0, metadata=_SECONDS)
    """Of the gradient norm, clipping and the optimizer, for every unit that a rank trains."""
    weight_update_seconds: float = field(default=0.0, metadata=_SECONDS)
    """The same, for every weight that the rank updates."""

    def to_dict(self) -> dict[str, float]:
        """Plain form, read back by `from_dict`."""
        return asdict(self)
