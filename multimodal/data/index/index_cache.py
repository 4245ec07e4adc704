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

    def get(
        self, folder: DataPath, *, name: str, depends_on: Iterable[str], build: Callable[[int], Iterator[SampleIndex]]
    ) -> SampleIndex:
        """Return the index of the data in `folder`: read if it has been written, else built and written, and the log says where.

        name: of the data, for the log; depends_on: everything it depends on beside `text`; build: makes the index block by block,
        behind so many samples, which have been written. An index that cannot be written anywhere is only returned, unless the
        folder was chosen: then ConfigError is raised.
        """

        def blocks(done: int = 0) -> Iterator[SampleIndex]:
            if done:
                logger.info("%s: indexing goes on behind %s samples, after which it was ended", folder, f"{done:,}")
            try:
                yield from watch_indexing(build(done), path=name)
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
            logger.info("%s: indexed into %s (elsewhere: --data-cache-path DIR; it may be removed)", name, place)
            return read_index(place) or join_indices(blocks())  # mapped, so that ranks of a node share its memory
        lost = "but the index cannot be kept beside it, so each run makes it again (--data-cache-path DIR)"
        logger.info("%s: indexed %s", name, lost)
        return join_indices(blocks())


_SECONDS_BETWEEN_LINES = 30.0
logger = logging.getLogger(__name__)


def watch_indexing(
    blocks: Iterator[SampleIndex], *, path: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[SampleIndex]:
    """Yield indices of blocks, and show how many samples there were; on the rank that logs alone.

    path: names the data. console: by default that of standard output. How many samples there will be is not known.
    """
    if not logger.isEnabledFor(logging.INFO):
        yield from blocks
        return
    console, last, number = console or Console(), clock(), 0
    columns = (SpinnerColumn(), TextColumn("indexing {task.description}: {task.completed:,} samples"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(path, total=None)
        for block in blocks:
            number += len(block) + sum(block.skipped.values())
            progress.update(task, completed=number)
            yield block
            if not console.is_terminal and clock() - last >= _SECONDS_BETWEEN_LINES:
                last = clock()
                logger.info("%s: indexed %s samples so far", path, f"{number:,}")
