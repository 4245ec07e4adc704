"""The samples of each global batch, a pure function of the step, and the notation of splits."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.balance.placement import turns_of
from multimodal.values.arrays.rows import Integers, row_starts
from multimodal.values.errors import ConfigError, DataError

BLOCK_SIZE = 2**20
"""Samples that are shuffled together, so that no order of all samples is in memory."""


class SplitPart(Sequence[int]):
    """Ascending source indices of one part; one block after another is drawn when it is needed."""

    def __init__(self, cuts: Integers, part: int, *, num_samples: int, seed: int) -> None:
        """cuts: [num_blocks + 1, num_parts + 1] samples of the parts before each in the blocks before each."""
        self._cuts, self._part, self._num_samples, self._seed = cuts, part, num_samples, seed
        self._starts = cuts[:, part + 1] - cuts[:, part]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        """Return one index."""
        number = range(len(self))[index]
        block = int(np.searchsorted(self._starts, number, side="right")) - 1
        return int(self._block(block)[number - self._starts[block]])

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[np.int64]:
        """Return all indices."""
        return np.concatenate([np.empty(0, np.int64), *map(self._block, range(len(self._cuts) - 1))])

    def _block(self, block: int) -> npt.NDArray[np.int64]:
        first, last = (self._cuts[block + 1, part] - self._cuts[block, part] for part in (self._part, self._part + 1))
        size = min(BLOCK_SIZE, self._num_samples - block * BLOCK_SIZE)
        return _taken(size, self._seed, block, int(first), int(last))


@lru_cache(maxsize=8)
def _taken(size: int, seed: int, block: int, first: int, last: int) -> npt.NDArray[np.int64]:
    return np.sort(_order(size, seed, 0, block)[first:last]).astype(np.int64) + block * BLOCK_SIZE


class Splits(NamedTuple):
    """The samples of each part."""

    train: SplitPart
    valid: SplitPart
    test: SplitPart


def split_indices(num_samples: int, *, split: str, seed: int) -> Splits:
    """Cut samples at random into parts of the sizes in `split` ("969,30,1": train, valid, test).

    Training and validation get at least one sample each if their share is above 0; a missing share is 0. Deterministic in the
    arguments. Raises DataError if a part with a share is empty.
    """
    shares = (*parse_split(split), 0.0, 0.0)[:3]
    bounds = np.rint(np.cumsum((0.0, *shares)) / sum(shares) * num_samples).astype(np.int64)
    sizes = np.diff(bounds)
    for part in (0, 1):
        if shares[part] > 0 and sizes[part] == 0:
            largest = 2 - int(np.argmax(sizes[::-1]))  # of equal ones the last: test before valid before train
            sizes[largest] -= 1
            sizes[part] += 1
    for name, share, size in zip(Splits._fields[:2], shares[:2], sizes[:2], strict=True):
        if share > 0 and size < 1:
            raise DataError(f"--split {split} of {num_samples} samples leaves none for '{name}'; use more data, or give it none")
    before = np.minimum(np.arange(-(-num_samples // BLOCK_SIZE) + 1) * BLOCK_SIZE, num_samples)
    cuts = np.rint(np.outer(before, row_starts(sizes)) / max(1, num_samples)).astype(np.int64)
    return Splits(*(SplitPart(cuts, part, num_samples=num_samples, seed=seed) for part in range(3)))


def parse_split(split: str) -> list[float]:
    """Return the proportions of a split; none if it is invalid."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        return []
    return shares if len(shares) <= 3 and all(0 <= share < float("inf") for share in shares) and sum(shares) > 0 else []


_TURNS = 10_000
"""Resolution of the weights of a mixture, as the inverse of a fraction."""
MOST_JOINED = 2**16
"""Most samples in a sequence."""


class DrawnSample(NamedTuple):
    """One sample of a global batch."""

    sample_id: int
    """Position in the order of consumption, unique over the run; in a sequence, its place there plus MOST_JOINED times that."""
    source_index: int


@dataclass(frozen=True, slots=True)
class DataPart:
    """One data set of a mixture."""

    num_samples: int
    """Its samples, or its sequences of samples, which count as one."""
    weight: float = 1.0
    """Its share of every global batch, in any unit."""
    position: int = 0
    """Samples drawn from it before the first step of `GlobalBatches`, in a resumed run."""
    starts: Integers | None = field(default=None, compare=False, repr=False)
    """[num_samples + 1] the first sample of each sequence, and the end; None: samples are drawn one by one."""

    def samples(self, index: int) -> range:
        """Return the samples that are drawn as one."""
        return range(index, index + 1) if self.starts is None else range(*self.starts[index : index + 2].tolist())

    @property
    def end(self) -> int:
        """The number of its samples in the source."""
        return self.samples(self.num_samples - 1).stop


def join_samples(num_tokens: Integers, *, most: int) -> Integers:
    """Return the starts of sequences that take samples in order while they have room, and the number of samples.

    num_tokens: of each sample; most: tokens in a sequence, but one of a single sample may have more. O(samples).
    """
    ends, starts, before = np.cumsum(num_tokens).data, [0], 0
    while (first := starts[-1]) < len(ends):
        starts.append(bisect_right(ends, before + most, first + 1, min(first + MOST_JOINED, len(ends))))
        before = ends[starts[-1] - 1]
    return np.array(starts)


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """The endless sequence of global batches, which takes turns between data sets by their weights, epoch by epoch."""

    parts: tuple[DataPart, ...]
    """The data sets; the source lists their samples one set after another."""
    global_batch_size: int
    seed: int
    shuffle: bool = True
    """Draw a new order each epoch; False: the data set's own order."""
    first_step: int = 0
    """The first step (from 0) whose batch is drawn here."""
    first_sample: int = 0
    """Samples that were consumed before it."""
    block_size: int = BLOCK_SIZE
    """Samples in a block: an epoch shuffles blocks, and the samples in each."""

    def __post_init__(self) -> None:
        if not self.parts or any(part.num_samples < 1 for part in self.parts):
            raise DataError("there are 0 samples to draw batches from; check --data-path and --split")
        if self.global_batch_size < 1:
            raise ConfigError(f"--global-batch-size is {self.global_batch_size}; set it to 1 or more")

    def batch(self, step: int) -> tuple[DrawnSample, ...]:
        """Return the samples of global batch `step` (from 0), in the order of consumption."""
        first = (step - self.first_step) * self.global_batch_size
        numbers = np.arange(first, first + self.global_batch_size)
        turns, shares, before = _turns(self._weights)
        rounds, places = np.divmod(numbers, len(turns))
        owners = turns[places]
        drawn = np.array([part.position for part in self.parts])[owners] + rounds * shares[owners] + before[places, owners]
        offsets = row_starts([part.end for part in self.parts])
        return tuple(
            DrawnSample(number if self.parts[part].starts is None else number * MOST_JOINED + place, int(offsets[part]) + index)
            for number, part, count in zip((self.first_sample + numbers).tolist(), owners.tolist(), drawn.tolist(), strict=True)
            for place, index in enumerate(self.parts[part].samples(self._index_in_part(part, count)))
        )

    def positions(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each data set that are consumed before step `step`."""
        turns, shares, before = _turns(self._weights)
        rounds, place = divmod((step - self.first_step) * self.global_batch_size, len(turns))
        return tuple(
            part.position + rounds * share + count
            for part, share, count in zip(self.parts, shares.tolist(), before[place].tolist(), strict=True)
        )

    @property
    def _weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.parts)

    def _index_in_part(self, part: int, count: int) -> int:
        num_samples = self.parts[part].num_samples
        epoch, position = divmod(count, num_samples)
        if not self.shuffle:
            return position
        blocks, starts = _block_order(num_samples, self.block_size, self.seed, epoch)
        number = int(np.searchsorted(starts, position, side="right")) - 1
        block, size = int(blocks[number]), int(starts[number + 1] - starts[number])
        return block * self.block_size + int(_order(size, self.seed, epoch, block)[position - starts[number]])


def shuffled(indices: Integers, *, seed: int) -> Integers:
    """Return samples in the order in which they are joined."""
    return indices[_order(len(indices), seed, 0, 0)]


@lru_cache(maxsize=8)
def _turns(weights: tuple[float, ...]) -> tuple[Integers, Integers, Integers]:
    """Return each turn's owner in one round, [num_turns]; turns of each; those before each turn, [num_turns, num_parts]."""
    if len(weights) == 1:  # which may be 0
        return np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros((1, 1), np.int64)
    total = math.fsum(weights)
    shares = [max(1, round(_TURNS * weight / total)) for weight in weights]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    turns = turns_of(tuple(shares))
    is_turn = turns[:, None] == np.arange(len(shares))
    return turns, np.array(shares), np.cumsum(is_turn, axis=0) - is_turn


@lru_cache(maxsize=64)
def _block_order(num_samples: int, block_size: int, seed: int, epoch: int) -> tuple[Integers, Integers]:
    """Return the blocks of an epoch in order, [num_blocks], and the position at which each begins, and the end."""
    num_blocks = -(-num_samples // block_size)
    blocks = _order(num_blocks, seed, epoch, num_blocks).astype(np.int64)
    return blocks, row_starts(np.minimum(block_size, num_samples - blocks * block_size))


@lru_cache(maxsize=16)
def _order(size: int, seed: int, epoch: int, block: int) -> npt.NDArray[np.int32]:
    """Return an order of a block's samples; a zero at the end changes no seed sequence, so block 0 has that of (seed, epoch)."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, block))))
    return generator.permutation(np.arange(size, dtype=np.int32))
