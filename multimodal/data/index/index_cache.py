"""Folders of written indices, beside the data or in the user's cache, and the progress shown while one is made."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from multimodal.data.index.sample_index import FORMAT, SampleIndex, join_indices, read_index, write_index
from multimodal.data.remote import DataPath, user_cache
from multimodal.values.errors import ConfigError, DataError

FOLDER_NAME = ".braid-index"


@dataclass(frozen=True)
class IndexCache:
    """Keeps indices under keys of everything that they depend on, so that an outdated index is never found."""

    text: str
    """Describes everything that tokens depend on: digests of tokenizer and chat template, and versions of the packages."""
    chosen: Path | None = None
    """The folder for all indices; None: beside the data, or, if that cannot be written, the user's."""
    report: Callable[[Path | None], None] = lambda place: None
    """Told where a new index was written; None: nowhere."""

    def get(self, folder: DataPath, *, depends_on: Iterable[str], build: Callable[[int], Iterator[SampleIndex]]) -> SampleIndex:
        """Return the index of the data in `folder`: read if it has been written, else built and written.

        depends_on: everything it depends on beside `text`; build: makes the index block by block, behind so many samples, which
        have been written. An index that cannot be written anywhere is only returned, unless the folder was chosen: then
        ConfigError is raised.
        """

        def blocks(done: int = 0) -> Iterator[SampleIndex]:
            if done:
                logger.info("%s: indexing goes on behind %s samples, after which it was ended", folder, f"{done:,}")
            try:
                yield from build(done)
            except OSError as problem:  # else it would be taken for one of the folder that is written to
                raise DataError(
                    f"{folder}: the data cannot be read ({problem}); make them readable, or copy them again"
                ) from problem

        key = hashlib.blake2b("\0".join((str(FORMAT), self.text, *depends_on)).encode(errors="surrogatepass"), digest_size=16)
        beside = [folder / FOLDER_NAME] if isinstance(folder, Path) else []
        folders = [self.chosen] if self.chosen else [*beside, user_cache("index")]
        places = [place / key.hexdigest() for place in folders]
        for place in places:
            if (found := read_index(place)) is not None:
                return found
        for place in places:
            try:
                write_index(blocks, place)
            except OSError as problem:
                if self.chosen:
                    raise ConfigError(
                        f"--data-cache-path {self.chosen}: the index cannot be written ({problem.strerror}); give a folder that "
                        "can, or leave the flag out"
                    ) from problem
                continue
            self.report(place)
            return read_index(place) or join_indices(blocks())  # mapped, so that ranks of a node share its memory
        self.report(None)
        return join_indices(blocks())


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
