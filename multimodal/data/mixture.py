"""Reads the data sets and weights of `--data-path`, in Megatron's notation: `0.7 A 0.3 B`, or `A B`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from multimodal.values.errors import ConfigError


class NamedData(NamedTuple):
    """One data set of a mixture."""

    path: str
    weight: float | None = None
    """Its share of every global batch, in any unit; None: in proportion to its number of training samples."""


def read_mixture(words: Sequence[str]) -> tuple[NamedData, ...]:
    """Return the data sets of a mixture; raises ConfigError if numbers and paths do not alternate, or a path is repeated."""
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        found = tuple(map(NamedData, words))
    else:
        weights, paths = numbers[::2], words[1::2]
        if len(words) % 2 or None in weights or any(number is not None for number in numbers[1::2]):
            raise ConfigError(
                f"--data-path {' '.join(words)}: expected a weight before every path (0.7 a.jsonl 0.3 b.jsonl) or before none"
            )
        found = tuple(NamedData(path, weight) for path, weight in zip(paths, weights, strict=True))
    for data in found:
        if data.weight is not None and not 0 < data.weight < math.inf:
            raise ConfigError(f"--data-path {data.weight:g} {data.path}: the weight must be above 0; correct it or leave it out")
        if [other.path for other in found].count(data.path) > 1:
            raise ConfigError(f"--data-path: {data.path} is there twice; give it once, with a larger weight")
    return found


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
