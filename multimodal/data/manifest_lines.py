"""The manifest format: one JSON object a line, `{"id": ..., "segments": [...]}`, checked as it is read.

A segment is `{"type": "text", "role": user | assistant | document, "text": ...}`, `{"type": "image", "path": ..., "width":
..., "height": ...}` (the size may be left out) or `{"type": "audio", "path": ...}`. An image with `"role": "assistant"` is an
answer, which a generator learns to make. `"unit"` says which unit an image or a clip is for, where several might take it. Other
keys are ignored.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.data.conversation import ROLES, TextSegment
from multimodal.values.errors import DataError

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""The first bytes of gzip, zstd, bzip2 and xz files."""
SEGMENT_TYPES = ("text", "image", "audio")


@dataclass(frozen=True, slots=True)
class ImageSegment:
    """An image file and its size in pixels, if the manifest gives it."""

    path: str
    """The path in the manifest's spelling: relative to the manifest's folder."""
    size: tuple[int, int] | None
    """(width, height)."""
    is_answer: bool = False
    """True if the assistant answers with it."""
    unit: str | None = None
    """The unit that it is for; None: the one that takes images, or makes them."""


@dataclass(frozen=True, slots=True)
class AudioSegment:
    """An audio file."""

    path: str
    unit: str | None = None
    """The unit that it is for; None: the one that takes sound."""


@dataclass(frozen=True, slots=True)
class ManifestLine:
    """One sample as the manifest describes it."""

    where: str
    """Manifest, line number and sample, for messages."""
    segments: tuple[TextSegment | ImageSegment | AudioSegment, ...]


def read_manifest_lines(path: Path) -> Iterator[ManifestLine]:
    """Yield the samples of a manifest in order; blank lines are passed over.

    Raises DataError naming the line for anything but the format above, for two samples of the same id, and for a manifest that is
    missing or cannot be read.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such manifest; give --data-path the path of an existing manifest.jsonl")
    line_of_id: dict[str | int, int] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _parse_line(raw, number=number, where=f"{path}, line {number}", line_of_id=line_of_id)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); make it readable or give another manifest") from problem


def _parse_line(raw: bytes, *, number: int, where: str, line_of_id: dict[str | int, int]) -> ManifestLine:
    if number == 1 and raw.startswith(_COMPRESSED):
        raise DataError(f"{where}: the manifest is compressed, expected JSON; unpack it first")
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as problem:  # of JSON, of UTF-8, of what is nested too deeply
        raise DataError(
            f"{where}: not a complete JSON object ({problem}); the line is cut off or damaged: restore it or remove it"
        ) from problem
    if not isinstance(entry, dict):
        raise DataError(f'{where}: expected a JSON object, found {type(entry).__name__}; write {{"id": ..., "segments": [...]}}')
    sample_id = _required(entry, "id", (str, int), where=where)
    if line_of_id.setdefault(sample_id, number) != number:
        raise DataError(
            f"{where}: the id {_shown(sample_id)} is already that of line {line_of_id[sample_id]}; give every sample an id "
            "of its own, or remove what is there twice"
        )
    where = f"{where} (sample {_shown(sample_id)})"
    segments = _required(entry, "segments", (list,), where=where)
    if not segments:
        raise DataError(f"{where}: 'segments' is empty; give the sample a segment or remove the line")
    parsed = tuple(_parse_segment(segment, where=f"{where}, segment {index}") for index, segment in enumerate(segments))
    return ManifestLine(where, parsed)


def _parse_segment(segment: Any, *, where: str) -> TextSegment | ImageSegment | AudioSegment:
    if not isinstance(segment, dict):
        raise DataError(f"{where}: expected a JSON object with a 'type', found {type(segment).__name__}; correct it")
    kind = _required(segment, "type", (str,), where=where)
    if kind == "text":
        role = _required(segment, "role", (str,), where=where)
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}")
        return TextSegment(role, _required(segment, "text", (str,), where=where))
    if kind == "image":
        path, size = _parse_path(segment, where=where), _parse_size(segment, where=where)
        return ImageSegment(path, size, is_answer=_is_answer(segment, where=where), unit=_parse_unit(segment, where=where))
    if kind == "audio":
        return AudioSegment(_parse_path(segment, where=where), _parse_unit(segment, where=where))
    raise DataError(f"{where}: unknown segment type {kind!r}; use one of {', '.join(SEGMENT_TYPES)}")


def _parse_path(segment: dict[str, Any], *, where: str) -> str:
    path: str = _required(segment, "path", (str,), where=where)
    if not path or "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise DataError(f"{where}: no file can be called {path!r}; correct 'path' or remove the segment")
    return path


def _parse_unit(segment: dict[str, Any], *, where: str) -> str | None:
    return None if segment.get("unit") is None else _required(segment, "unit", (str,), where=where)


def _is_answer(segment: dict[str, Any], *, where: str) -> bool:
    role = segment.get("role")
    if role is not None and role not in ROLES:
        raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}, or leave it out")
    return bool(role == "assistant")


def _parse_size(segment: dict[str, Any], *, where: str) -> tuple[int, int] | None:
    size = segment.get("width"), segment.get("height")
    if size == (None, None):
        return None
    width, height = size
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size):
        raise DataError(
            f"{where}: width and height must be positive whole numbers, found {_shown(width)} and {_shown(height)}; "
            "correct or remove both"
        )
    return width, height  # type: ignore[return-value]


def _shown_keys(entry: dict[str, Any]) -> str:
    return ", ".join(map(_shown, entry)) or "no keys"


def _shown(value: Any) -> str:
    """Spell a value of any length for a message."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to spell some of them
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _required(entry: dict[str, Any], key: str, kinds: tuple[type, ...], *, where: str) -> Any:
    if key not in entry:
        raise DataError(f"{where}: the key '{key}' is missing; found {_shown_keys(entry)}; add it, or remove the line")
    if not isinstance(entry[key], kinds) or isinstance(entry[key], bool):
        expected = " or ".join({"str": "text", "int": "a number", "list": "a list"}[kind.__name__] for kind in kinds)
        raise DataError(f"{where}: '{key}' must be {expected}, found {type(entry[key]).__name__}; correct it")
    return entry[key]
