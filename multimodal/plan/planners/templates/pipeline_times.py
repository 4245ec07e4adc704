"""Seconds of a step of one pipeline under 1F1B, for any number of microbatches, in closed form."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_MICROBATCHES = 2**40


@dataclass(frozen=True)
class PipelineTimes:
    """The stages of a pipeline, by the seconds of one microbatch."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def seconds(self, num_microbatches: int) -> float:
        """Return the seconds of a step: the longest path through one of the stages.

        Like the step of `map_stages`, but the wait of a stage is the longest path to any of the stages after it and back, not
        only to the last. It is never more than the simulated step, and nearly always equal to it (docs/elasticity.md). 0
        without microbatches.
        """
        if num_microbatches <= self.num_stages:
            return float(self._few[num_microbatches])
        return float((self._fixed + num_microbatches * self._total).max())

    def most_microbatches(self, seconds: float) -> int:
        """Return the number of microbatches that fit into a step of this many seconds."""
        if seconds < self.seconds(self.num_stages + 1):
            return int(np.searchsorted(self._few, seconds * (1 + 1e-12), side="right")) - 1
        busy = self._total > 0
        counts = (seconds * (1 + 1e-12) - self._fixed[busy]) / self._total[busy]
        return int(min(counts.min(initial=MOST_MICROBATCHES), MOST_MICROBATCHES))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @cached_property
    def _total(self) -> Floats:
        return np.asarray(np.array(self.forward) + np.array(self.backward))

    @cached_property
    def _few(self) -> Floats:
        """Seconds of steps of 0, 1, ... microbatches, up to the number of stages."""
        steps = [(self._path(count) + count * self._total).max() for count in range(1, self.num_stages + 1)]
        return np.maximum.accumulate(np.array([0.0, *steps]))

    @cached_property
    def _fixed(self) -> Floats:
        """Seconds of the path through each stage without its own microbatches, if these outnumber the stages."""
        return self._path(self.num_stages + 1)

    def _path(self, num_microbatches: int) -> Floats:
        count, total = self.num_stages, self._total
        stages = np.arange(count)
        behind = stages[None, :] - stages[:, None]  # [stage, a stage after it]
        before = np.concatenate(([0.0], np.cumsum(total)))
        way = np.where(behind > 0, before[None, 1:] - before[1:, None], 0.0)
        ahead = np.clip(behind, 0, num_microbatches - 1)
        waits = [(way - ahead * np.array(each)[:, None]).max(axis=1, initial=0.0) for each in (self.forward, self.backward)]
        has_steady_phase = count - 1 - stages < num_microbatches - 1
        idle = np.where(has_steady_phase, waits[0] + waits[1], np.maximum(*waits))
        return np.asarray(before[:-1] + idle)
