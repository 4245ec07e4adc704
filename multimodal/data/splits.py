"""A data set cut into training, validation and test samples, in Megatron's `--split` notation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.sample_source import ItemPixels, SampleSource, SampleText
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.sample_lengths import SampleLengths


class Splits(NamedTuple):
    """Ascending source indices of each part, [num_samples of the part]."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


def split_indices(num_samples: int, *, split: str, seed: int) -> Splits:
    """Cut samples at random into parts of the sizes that `split` ("969,30,1": train, valid, test) asks for.

    Training and validation get at least one sample each where their share is above 0; a missing share is 0. Deterministic in
    the arguments. Raises ConfigError for a malformed split, DataError when a part with a share comes out empty.
    """
    shares = _parse_split(split)
    bounds = np.rint(np.cumsum((0.0, *shares)) / sum(shares) * num_samples).astype(np.int64)
    sizes = np.diff(bounds)
    for part in (0, 1):
        if shares[part] > 0 and sizes[part] == 0:
            largest = 2 - int(np.argmax(sizes[::-1]))  # of equal ones the last: test before valid before train
            sizes[largest] -= 1
            sizes[part] += 1
    for name, share, size in zip(Splits._fields[:2], shares[:2], sizes[:2], strict=True):
        if share > 0 and size < 1:
            raise DataError(
                f"--split {split} of {num_samples} samples leaves none for '{name}'; use more data or set its share to 0"
            )
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(num_samples)
    train, valid, test = np.split(order, np.cumsum(sizes)[:2])
    return Splits(np.sort(train), np.sort(valid), np.sort(test))


class SourceSubset:
    """A `SampleSource` that shows some samples of another one, such as those of one split."""

    def __init__(self, source: SampleSource, indices: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Show the samples `indices` of `source`, in that order."""
        self._source = source
        self._indices = np.asarray(indices, dtype=np.int64)

    def __len__(self) -> int:
        """Count the samples shown."""
        return len(self._indices)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample; `sample_id` is its index in this subset."""
        found = self._source.lengths(self._at(index))
        return replace(found, sample_id=index)

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""
        return self._source.text(self._at(index))

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item of a sample."""
        return self._source.item(self._at(index), item_index)

    def item_grid(self, index: int, item_index: int) -> tuple[int, int]:
        """(rows, columns) of patches of one item."""
        return self._source.item_grid(self._at(index), item_index)

    def _at(self, index: int) -> int:
        return int(self._indices[index])


def _parse_split(split: str) -> tuple[float, float, float]:
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or sum(shares) == 0:
        raise ConfigError(f"--split {split!r}: expected up to three shares for training, validation and test, such as 969,30,1")
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    return train, valid, test
