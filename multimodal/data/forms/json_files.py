"""JSON on disk: one object per line, or a list of objects, read one by one, with the line at which each begins."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from multimodal.values.errors import DataError

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""The first bytes of gzip, zstd, bzip2 and xz files."""
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


class JsonFile:
    """The objects of one file: a manifest, or chats."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the line of each object, and the object; blank lines are skipped.

        Raises DataError naming the line for invalid JSON, for values that are no objects, and for a file that cannot be read.
        """
        path = self._path
        try:
            with path.open("rb") as file:
                start = file.read(64)
            values = _list_values(path) if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" else _line_values(path)
            for number, value in values:
                if not isinstance(value, dict):
                    raise DataError(
                        f"{path}, line {number}: expected a JSON object, found {type(value).__name__}; write "
                        '{"id": ..., "segments": [...]}, or an object with "messages" or "conversations"'
                    )
                yield f"line {number}", value
        except OSError as problem:
            raise DataError(f"{path}: cannot be read ({problem.strerror}); make it readable or give other data") from problem

    def digest(self) -> str:
        """Digest the whole content."""
        status = self._path.stat()
        return _content_digest(self._path, status.st_size, status.st_mtime_ns)

    def embedded(self, address: str) -> bytes:
        """JSON embeds no images."""
        raise DataError(f"{self._path}: holds no images, and so none at {address!r}; name a file")


@lru_cache(maxsize=4)
def _content_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Digest a file once, as long as it does not change."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _line_values(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1 and raw.startswith(_COMPRESSED):
                raise DataError(f"{path}, line 1: the manifest is compressed, expected JSON; unpack it first")
            if number == 1 and raw.strip() and not raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
                _check_any_json(raw, path)
            if raw.strip():
                try:
                    value = json.loads(raw)
                except (ValueError, RecursionError) as problem:  # from JSON, from UTF-8, or from deep nesting
                    raise DataError(
                        f"{path}, line {number}: not a complete JSON object ({problem}); the line is cut off or damaged: restore "
                        "it or remove it"
                    ) from problem
                yield number, value


def _check_any_json(raw: bytes, path: Path) -> None:
    """Raise DataError for a file that is none at all, such as a table of texts."""
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        shown = raw[:60].decode(errors="replace").strip()
        raise DataError(
            f"{path}, line 1: is no JSON: it begins with {shown!r}; give --data-path JSON with 'messages' or 'conversations' (a "
            "table of texts: write each row as such an object), a manifest.jsonl, or .parquet files"
        ) from None


def _list_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Decode the entries of a list one by one, so that only the text and one entry are in memory."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: is no UTF-8 ({problem}); save it as UTF-8") from problem
    place, number, seen = _behind_space(text, text.index("[") + 1), 1, 0
    if text[place : place + 1] == "]":
        _check_end(text, place, path=path)
        return
    while True:
        number, seen = number + text.count("\n", seen, place), place
        where = f"{path}, line {number}"
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as problem:
            raise DataError(
                f"{where}: not a complete JSON value ({problem}); the list is cut off or damaged: restore it"
            ) from None
        yield number, value
        place = _behind_space(text, place)
        if text[place : place + 1] == "]":
            _check_end(text, place, path=path)
            return
        if text[place : place + 1] != ",":
            raise DataError(
                f"{where}: behind this entry of the list neither ',' nor ']' follows; the list is cut off: restore it"
            )
        place = _behind_space(text, place + 1)


def _check_end(text: str, place: int, *, path: Path) -> None:
    """Raise DataError if something follows the `]` at a place, such as another list, which would be lost."""
    if (rest := _behind_space(text, place + 1)) < len(text):
        line = 1 + text.count("\n", 0, rest)
        raise DataError(f"{path}, line {line}: {text[rest : rest + 20]!r} follows the list; join lists into one, or remove it")


def _behind_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
