"""Folders of written indices: beside the data, or in the user's cache if the data's folder cannot be written."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.index.sample_index import FORMAT, SampleIndex, join_indices, read_index, write_index
from multimodal.values.errors import ConfigError

FOLDER_NAME = ".braid-index"


@dataclass(frozen=True)
class IndexCache:
    """Keeps indices under keys of everything that they depend on, so that an outdated index is never found."""

    text: str
    """Describes everything that tokens depend on: digests of tokenizer and chat template, and versions of the packages."""
    fallback: Path | None = None
    """The folder for indices of data in a read-only folder; None: XDG_CACHE_HOME/braid, by default ~/.cache/braid."""
    chosen: Path | None = None
    """The folder for all indices; None: beside the data, else the fallback."""
    report: Callable[[Path | None], None] = lambda place: None
    """Told where a new index was written; None: nowhere."""

    def get(self, folder: Path, *, depends_on: Iterable[str], build: Callable[[], Iterator[SampleIndex]]) -> SampleIndex:
        """Return the index of the data in `folder`: read if it has been written, else built and written.

        depends_on: everything it depends on beside `text`; build: makes the index block by block. An index that cannot be
        written anywhere is only returned, unless the folder was chosen: then ConfigError is raised.
        """
        key = hashlib.blake2b("\0".join((str(FORMAT), self.text, *depends_on)).encode(errors="surrogatepass"), digest_size=16)
        folders = (self.chosen,) if self.chosen else (folder / FOLDER_NAME, self.fallback or user_cache("index"))
        places = [place / key.hexdigest() for place in folders]
        for place in places:
            if (found := read_index(place)) is not None:
                return found
        for place in places:
            try:
                write_index(build(), place)
            except OSError as problem:
                if self.chosen:
                    raise ConfigError(
                        f"--data-cache-path {self.chosen}: the index cannot be written ({problem.strerror}); give a folder that "
                        "can, or leave the flag out"
                    ) from problem
                continue
            self.report(place)
            return read_index(place) or join_indices(build())  # mapped, so that ranks of a node share its memory
        self.report(None)
        return join_indices(build())


def user_cache(room: str) -> Path:
    """Return the user's cache folder for one kind of files: XDG_CACHE_HOME/braid, by default ~/.cache/braid."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "braid" / room
