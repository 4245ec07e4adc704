"""The samples that each global batch consumes: a pure function of the step, so that resuming is exact."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.values.errors import ConfigError, DataError


class DrawnSample(NamedTuple):
    """One sample of a global batch."""

    sample_id: int
    """Position in the order of consumption, unique over the run."""
    source_index: int


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """The endless sequence of global batches; an epoch visits every sample once, and a batch may span two epochs."""

    num_samples: int
    """Samples in the source."""
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """Draw a new order each epoch; False: the source's own order."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("there are 0 samples to draw batches from; check --data-path and --split")
        if self.global_batch_size < 1:
            raise ConfigError(f"--global-batch-size is {self.global_batch_size}; set it to 1 or more")

    def batch(self, step: int) -> tuple[DrawnSample, ...]:
        """Return the samples of global batch `step` (from 0), in the order of consumption."""
        first = step * self.global_batch_size
        return tuple(
            DrawnSample(sample_id, self._source_index(sample_id)) for sample_id in range(first, first + self.global_batch_size)
        )

    def _source_index(self, sample_id: int) -> int:
        epoch, position = divmod(sample_id, self.num_samples)
        return int(_epoch_order(self.num_samples, self.seed, epoch)[position]) if self.shuffle else position


@lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(num_samples)
