"""A data set cut into training, validation and test samples, in Megatron's `--split` notation."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.values.errors import DataError


class Splits(NamedTuple):
    """Ascending source indices of each part, [num_samples of the part]."""

    train: npt.NDArray[np.int64]
    valid: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


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
            raise DataError(
                f"--split {split} of {num_samples} samples leaves none for '{name}'; use more data or set its share to 0"
            )
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(num_samples)
    train, valid, test = np.split(order, np.cumsum(sizes)[:2])
    return Splits(np.sort(train), np.sort(valid), np.sort(test))


def parse_split(split: str) -> list[float]:
    """Return the proportions of a split; none if it is invalid."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        return []
    return shares if len(shares) <= 3 and all(0 <= share < float("inf") for share in shares) and sum(shares) > 0 else []
