"""Seconds interpolated linearly between measured sizes (DistTrain's profiler)."""

from bisect import bisect_right
from typing import NamedTuple


class Interpolated(NamedTuple):
    """Straight lines between points; the first and the last line go on beyond them. At least two points, tokens ascending."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_tokens: float, num_squared: float, num_sequences: float = 1) -> float:
        """Evaluate; several packed sequences cost as much as equal ones of their mean length (weighted by tokens), one by one."""
        if not num_tokens:
            return 0.0
        length = num_squared / num_tokens
        return num_tokens / length * self._at_one(length)

    def shared(self, factor: float) -> "Interpolated":
        """The same work times `factor`, as on more or fewer ranks."""
        return Interpolated(self.tokens, tuple(factor * value for value in self.seconds))

    def _at_one(self, length: float) -> float:
        right = min(max(bisect_right(self.tokens, length), 1), len(self.tokens) - 1)
        (before, after), (low, high) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(0.0, low + (high - low) * (length - before) / (after - before))
