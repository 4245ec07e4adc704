"""Folders of written indices: beside the data, or in the user's cache if the data's folder cannot be written."""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.index.sample_index import FORMAT, SampleIndex, read_index

FOLDER_NAME = ".braid-index"


@dataclass(frozen=True)
class IndexCache:
    """Keeps indices under keys of all that they depend on, so that one that does not fit is never found."""

    text: str
    """Says what tokens depend on: the tokenizer's and the chat template's digests, and the versions of the packages."""
    fallback: Path | None = None
    """The folder for indices of data that is in a folder of others; None: XDG_CACHE_HOME/braid, by default ~/.cache/braid."""

    def get(self, folder: Path, *, depends_on: Iterable[str], build: Callable[[], SampleIndex]) -> SampleIndex:
        """Return the index of the data in `folder`, read from where it was written, else built and written.

        depends_on: what it depends on beside `text`. An index that cannot be written anywhere is only returned.
        """
        key = hashlib.blake2b("\0".join((str(FORMAT), self.text, *depends_on)).encode(errors="surrogatepass"), digest_size=16)
        places = [place / key.hexdigest() for place in (folder / FOLDER_NAME, self.fallback or user_cache("index"))]
        for place in places:
            if (found := read_index(place)) is not None:
                return found
        index = build()
        for place in places:
            try:
                index.write(place)
            except OSError:
                continue
            return read_index(place) or index  # mapped: what was built takes this process's memory alone
        return index


def user_cache(room: str) -> Path:
    """Return the folder for what a user's runs keep of one kind: XDG_CACHE_HOME/braid, by default ~/.cache/braid."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "braid" / room
