"""The waits of a stage's computations for collectives of its tensor parallel ranks, and what runs in them (Optimus, 4.2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TensorParallelWaits:
    """Numbers the waits of one computation from 0, in the order in which it comes to them, and calls what fills them.

    A forward and a backward count from 0 each, recomputed collectives included. The layers of a stage hold one such object, so
    it is found from every thread in which autograd runs a backward.
    """

    def __init__(self) -> None:
        self._fill: Callable[[int], None] | None = None
        self.count = 0
        """Waits that the computation has come to."""

    @property
    def are_filled(self) -> bool:
        """True while something may run in the waits of a computation."""
        return self._fill is not None

    @contextmanager
    def filled_by(self, fill: Callable[[int], None]) -> Iterator[None]:
        """Call `fill` with the number of each wait that is come to inside, while its collective is under way."""
        assert self._fill is None, "one computation at a time has waits to fill"
        self._fill, self.count = fill, 0
        try:
            yield
        finally:
            self._fill = None

    def reach(self) -> None:
        """Called when a collective is under way, and nothing is left to do but to wait for it; what fills a wait has none."""
        fill, number = self._fill, self.count
        if fill is None:
            return
        self._fill, self.count = None, number + 1
        try:
            fill(number)
        finally:
            self._fill = fill
