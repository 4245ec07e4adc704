"""The size of a measured input: tokens in sequences of equal length."""

from typing import NamedTuple


class PackedSize(NamedTuple):
    """`num_tokens` tokens, packed as `num_sequences` sequences of equal length."""

    num_tokens: int
    num_sequences: int = 1

    @property
    def num_squared(self) -> float:
        """Sum of the squares of the sequences' lengths."""
        return self.num_tokens**2 / self.num_sequences
