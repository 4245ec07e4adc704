"""The waits of a stage's computations for collectives of its tensor parallel ranks, and what runs in them (Optimus, 4.2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TensorParallelWaits:
    """Numbers the waits of one computation from 0, in the order in which it comes to them, and calls what fills them.

    What comes behind a wait is called when its collective is complete: there the collectives of what filled it start, so that
    they have the links to themselves while the computation goes on.

    A forward and a backward count from 0 each, recomputed collectives included. The layers of a stage hold one such object, so
    it is found from every thread in which autograd runs a backward.
    """

    def __init__(self) -> None:
        self._fill: Callable[[int], None] | None = None
        self._go_on: Callable[[], None] = lambda: None
        self.count = 0
        """Waits that the computation has come to."""

    @property
    def are_filled(self) -> bool:
        """True while something may run in the waits of a computation."""
        return self._fill is not None

    @contextmanager
    def filled_by(self, fill: Callable[[int], None], *, go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Call `fill` with the number of each wait that is come to inside, while its collective is under way, then `go_on`."""
        assert self._fill is None, "one computation at a time has waits to fill"
        self._fill, self._go_on, self.count = fill, go_on, 0
        try:
            yield
        finally:
            self._fill = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Waits inside it for a collective that is under way; what fills the wait runs before, and has no such waits itself."""
        fill, number = self._fill, self.count
        if fill is None:
            yield
            return
        self._fill, self.count = None, number + 1
        try:
            fill(number)
            yield
            self._go_on()
        finally:
            self._fill = fill
