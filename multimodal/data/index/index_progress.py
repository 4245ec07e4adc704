"""Progress of indexing data: a bar on a terminal, a line now and then in a log."""

import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from multimodal.data.index.sample_index import SampleIndex

_SECONDS_BETWEEN_LINES = 30.0
logger = logging.getLogger(__name__)


def watch_indexing(
    blocks: Iterator[SampleIndex], *, path: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[SampleIndex]:
    """Yield indices of blocks, and show how many samples there were; on the rank that logs alone.

    path: names the data. console: by default that of standard output. How many samples there will be is not known.
    """
    console = console or Console()
    if not logger.isEnabledFor(logging.INFO):
        yield from blocks
        return
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("indexing {task.description}: {task.completed:,} samples"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(path, total=None)
            for block in blocks:
                progress.advance(task, _num_read(block))
                yield block
        return
    last, number = clock(), 0
    for block in blocks:
        number += _num_read(block)
        yield block
        if clock() - last >= _SECONDS_BETWEEN_LINES:
            last = clock()
            logger.info("%s: indexed %s samples so far", path, f"{number:,}")


def _num_read(block: SampleIndex) -> int:
    return len(block) + sum(block.skipped.values())
