"""Which rows of a message between units each context parallel rank gives, and which it takes."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class RowShares:
    """Rows of one route, by context parallel rank of either end; all of them ascending.

    Of what an encoder hands to the LLM every row is given by one rank and taken by one. What the LLM hands to a generator may be
    taken by several, whose gradients of it add up where it came from. A rank is sent what it takes, and nothing more.
    """

    def __init__(self, *, given: tuple[Rows, ...], taken: tuple[Rows, ...]) -> None:
        self.given, self.taken = given, taken

    def reversed(self) -> "RowShares":
        """Those of the gradients, which travel the other way."""
        return RowShares(given=self.taken, taken=self.given)

    @cached_property
    def common(self) -> tuple[tuple[Rows, ...], ...]:
        """[taking rank][giving rank]: rows that travel between the two."""
        return tuple(tuple(np.intersect1d(own, other, assume_unique=True) for other in self.given) for own in self.taken)

    def first_row(self, source: int, target: int) -> int:
        """Where what `source` gives begins among everything that `target` receives, giving rank by giving rank."""
        return sum(map(len, self.common[target][:source]))

    def num_received(self, target: int) -> int:
        """Rows that a taking rank receives; more than it takes where gradients add up."""
        return sum(map(len, self.common[target]))

    def positions_given(self, source: int, target: int) -> Rows:
        """Where the rows that travel between the two stand among all that `source` gives."""
        return np.searchsorted(self.given[source], self.common[target][source])

    def positions_taken(self, target: int) -> Rows:
        """Where each row that a rank receives belongs among those that it takes."""
        return np.searchsorted(self.taken[target], np.concatenate(self.common[target]))
