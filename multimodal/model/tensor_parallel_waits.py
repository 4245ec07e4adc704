"""The waits of a stage's computations for tensor parallel collectives, and the work that runs in them (Optimus, 4.2).

Braid's layers report their waits. Autograd functions of Transformer Engine wait for collectives wherever they need the result, as
those of megatron-core do, and find collectives among the names of their modules. There is no class to derive from, so these names
are replaced. Waits come in the order of Braid's own layers; those of a backward come behind its weight gradient, if there is one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar

COLLECTIVES = ("allreduce", "gather_along_first_dim", "reduce_scatter_along_first_dim")
MODULES = ("base", "linear", "layernorm_linear")
"""Of `transformer_engine.pytorch.module`; each imports some of the collectives."""


class TensorParallelWaits:
    """Numbers the waits of one computation from 0, in the order in which they occur, and calls the work that fills them.

    The work behind a wait is called when its collective is complete: it starts the collectives of the work that filled the wait,
    so that these have the links to themselves while the computation continues.

    A forward and a backward each count from 0, recomputed collectives included. The layers of a stage hold one such object, so
    every thread in which autograd runs a backward finds it.
    """

    current: "ClassVar[TensorParallelWaits | None]" = None
    """Those of the computation of this process whose waits are filled."""

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
        TensorParallelWaits.current = self
        try:
            yield
        finally:
            self._fill = TensorParallelWaits.current = None

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


def report_engine_waits() -> None:
    """Replace the collectives of these modules, once in a process; outside of computations with work in waits nothing changes."""
    for module in (import_module(f"transformer_engine.pytorch.module.{name}") for name in MODULES):
        for name in COLLECTIVES:
            call = getattr(module, name, None)
            if call is not None and not hasattr(call, "reports_waits"):
                setattr(module, name, _reporting(call))


def _reporting(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def reporting(tensor: Any, group: Any, async_op: bool = False, **options: Any) -> Any:
        waits = TensorParallelWaits.current
        if waits is None:
            return call(tensor, group, async_op, **options)
        result, work = call(tensor, group, True, **options)
        reported = None if work is None else _ReportedWork(work, waits)
        if reported is None or async_op:
            return result, reported
        reported.wait()
        return result, None

    reporting.reports_waits = True  # type: ignore[attr-defined]
    return reporting


class _ReportedWork:
    """A collective under way."""

    def __init__(self, work: Any, waits: TensorParallelWaits) -> None:
        self._work, self._waits = work, waits

    def wait(self) -> None:
        """Wait for it; work that fills the wait runs before."""
        with self._waits.filled():
            self._work.wait()
