"""Progress of indexing data: a bar on a terminal, a line now and then in a log."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 30.0
_Sample = TypeVar("_Sample")
logger = logging.getLogger(__name__)


def watch_indexing(
    samples: Iterator[_Sample], *, path: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[_Sample]:
    """Yield samples, and show how many there were; on the rank that logs alone.

    path: names the data. console: by default that of standard output. How many samples there will be is not known.
    """
    console = console or Console()
    if not logger.isEnabledFor(logging.INFO):
        yield from samples
        return
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("indexing {task.description}: {task.completed:,} samples"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield from progress.track(samples, description=path, total=None)
        return
    last = clock()
    for number, sample in enumerate(samples, start=1):
        yield sample
        if clock() - last >= _SECONDS_BETWEEN_LINES:
            last = clock()
            logger.info("%s: indexed %s samples so far", path, f"{number:,}")
