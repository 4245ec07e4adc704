"""A cache, in the user's cache folder, of values that take long to compute, under keys of everything they depend on."""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multimodal.data.index.index_cache import user_cache

_FORMAT = 1


def key_of(depends_on: Iterable[object]) -> str:
    """Return a key that, with near certainty, only equal dependencies share; Braid's version is one of them."""
    digest = hashlib.blake2b(digest_size=8)
    for each in (_FORMAT, version_of("braid"), *depends_on):
        digest.update(f"{each}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def find_value(room: str, key: str) -> dict[str, Any] | None:
    """Return a cached value; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads((user_cache(room) / f"{key}.json").read_text())
        return found if isinstance(found, dict) else None
    return None


def keep_value(room: str, key: str, value: Mapping[str, Any]) -> None:
    """Keep a value for later runs, if the user's cache can be written."""
    with suppress(OSError):
        write_whole(user_cache(room) / f"{key}.json", json.dumps(value))


def place_file(room: str, name: str, text: str) -> Path:
    """Return a file with this text: in the user's cache, or if that cannot be written, in a new folder of this process."""
    path = user_cache(room) / name
    with suppress(OSError, ValueError):
        if path.is_file() and path.read_text() == text:
            return path
    try:
        write_whole(path, text)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="braid-")) / name
        path.write_text(text)
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
