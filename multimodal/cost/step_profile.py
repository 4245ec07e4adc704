"""What a step was measured to take beside its layers: the runtime's own work, and the optimizer's."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from multimodal.values.errors import ConfigError


@dataclass(frozen=True)
class StepProfile:
    """Seconds of one rank."""

    seconds: float = 0.0
    """Of every step, however much it computes: clearing gradients, starting, summing up."""
    computation_seconds: float = 0.0
    """Of every forward and every backward: finding its inputs, handing on its outputs."""
    unit_update_seconds: float = 0.0
    """Of the gradient norm, clipping and the optimizer, for every unit that a rank trains."""
    weight_update_seconds: float = 0.0
    """The same, for every weight that the rank updates."""

    def to_dict(self) -> dict[str, float]:
        """Plain form, read back by `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> "StepProfile":
        """Build from the plain form; raises ConfigError naming the offending key."""
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            raise ConfigError(f"layer costs, step: expected a mapping with {', '.join(known)}, found {value!r}")
        for name, number in value.items():
            if name not in known:
                raise ConfigError(f"layer costs, step: unknown key '{name}'; known keys are {', '.join(known)}")
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not math.isfinite(number) or number < 0:
                raise ConfigError(f"layer costs, step, {name}: expected a number of at least 0, found {number!r}")
        return cls(**{name: float(number) for name, number in value.items()})
