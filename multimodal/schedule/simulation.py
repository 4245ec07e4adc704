"""What a simulation says of one step: when everything happened, how long it took, and where the time went."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multimodal.schedule.compile_schedule import CompiledSchedule
from multimodal.schedule.event_arrays import EventTimes, NodeKind
from multimodal.schedule.simulated_timeline import build_timeline
from multimodal.values.schedule import Place
from multimodal.values.timeline import Timeline


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate_schedule`. `timeline` and `stage_seconds` are made when first asked for."""

    iteration_seconds: float
    """From the step's start until everything has ended, messages and collectives included."""
    ideal_seconds: float
    """Total seconds of computations over the number of lanes: no schedule of these computations is shorter."""
    mfu: float
    """The model's FLOPs over those that all ranks could do in this time at their peak; 0 where either is unknown."""
    bubble: Mapping[str, float]
    """Kind (`BUBBLE_KINDS`) -> fraction of lane time; with `busy_fraction` they sum to 1."""
    busy_seconds: tuple[float, ...]
    """Per lane the time in which it computes; waits for tensor parallel collectives inside a layer are not counted."""
    peak_activation_bytes: tuple[int, ...]
    """Per lane, of each of its ranks: the most that its places keep at one time."""
    peak_total_bytes: tuple[int, ...]
    """Per lane, of each of its ranks: the peak of activations, and weights, gradients and optimizer state."""
    num_microbatches: int
    """Of the unit that has most, over all its replicas."""
    compiled: CompiledSchedule
    """The schedule as arrays."""
    times: EventTimes
    """When every node of `compiled` started and ended."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.busy_seconds)

    @property
    def busy_fraction(self) -> float:
        """Fraction of lane time in which something is computed."""
        return sum(self.busy_seconds) / (self.num_lanes * self.iteration_seconds) if self.iteration_seconds else 0.0

    @property
    def peak_memory_bytes(self) -> int:
        """The most that any rank needs."""
        return max(self.peak_total_bytes, default=0)

    @cached_property
    def timeline(self) -> Timeline:
        """Computations, the time lanes stood still for receives, sends and collectives: what a run measures."""
        return build_timeline(self.compiled, self.times)

    @cached_property
    def stage_seconds(self) -> Mapping[Place, float]:
        """Seconds of computation per microbatch and virtual stage, forward and backward together."""
        seconds: dict[Place, float] = {}
        arrays = self.compiled.arrays
        for node in np.flatnonzero(arrays.kinds == NodeKind.COMPUTE).tolist():
            place = self.compiled.actions[node].place
            seconds[place] = seconds.get(place, 0.0) + float(arrays.seconds[node])
        return seconds
