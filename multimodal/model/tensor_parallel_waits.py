"""The waits of a stage's computations for tensor parallel collectives, and the work that runs in them (Optimus, 4.2)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TensorParallelWaits:
    """Numbers the waits of one computation from 0, in the order in which they occur, and calls the work that fills them.

    The work behind a wait is called when its collective is complete: it starts the collectives of the work that filled the wait,
    so that these have the links to themselves while the computation continues.

    A forward and a backward each count from 0, recomputed collectives included. The layers of a stage hold one such object, so
    every thread in which autograd runs a backward finds it.
    """

    def __init__(self) -> None:
        self._fill: Callable[[int], None] | None = None
        self._go_on: Callable[[], None] = lambda: None
        self.count = 0
        """Waits of the computation so far."""

    @property
    def are_filled(self) -> bool:
        """True while something may run in the waits of a computation."""
        return self._fill is not None

    @contextmanager
    def filled_by(self, fill: Callable[[int], None], *, go_on: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Call `fill` with the number of each wait that occurs inside, while its collective is under way, then `go_on`."""
        assert self._fill is None, "one computation at a time has waits to fill"
        self._fill, self._go_on, self.count = fill, go_on, 0
        try:
            yield
        finally:
            self._fill = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Waits inside for a collective that is under way; work that fills the wait runs first, without waits of its own."""
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
