"""The manifest format: one JSON object a line, `{"id": ..., "segments": [...]}`, checked as it is read.

A segment is `{"type": "text", "role": user | assistant | document, "text": ...}`, `{"type": "image", "path": ..., "width":
..., "height": ...}` (the size may be left out) or `{"type": "audio", "path": ...}`. An image with `"role": "assistant"` is an
answer, which a generator learns to make. Other keys are ignored.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.data.conversation import ROLES, TextSegment
from multimodal.values.errors import DataError

SEGMENT_TYPES = ("text", "image", "audio")


@dataclass(frozen=True, slots=True)
class ImageSegment:
    """An image file and its size in pixels, if the manifest gives it."""

    path: str
    """As the manifest spells it: relative to the manifest's folder."""
    size: tuple[int, int] | None
    """(width, height)."""
    is_answer: bool = False
    """Whether the assistant answers with it."""


@dataclass(frozen=True, slots=True)
class AudioSegment:
    """An audio file."""

    path: str


@dataclass(frozen=True, slots=True)
class ManifestLine:
    """One sample as the manifest describes it."""

    where: str
    """Manifest, line number and sample, for messages."""
    segments: tuple[TextSegment | ImageSegment | AudioSegment, ...]


def read_manifest_lines(path: Path) -> Iterator[ManifestLine]:
    """Yield the samples of a manifest in order; blank lines are passed over.

    Raises DataError naming the line for anything but the format above, and for a manifest that is missing.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such manifest; give --data-path the path of an existing manifest.jsonl")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield _parse_line(raw, where=f"{path}, line {number}")


def _parse_line(raw: bytes, *, where: str) -> ManifestLine:
    try:
        entry = json.loads(raw)
    except ValueError as problem:  # of JSON or of UTF-8
        raise DataError(
            f"{where}: not a complete JSON object ({problem}); the line is cut off or damaged: restore it or remove it"
        ) from problem
    if not isinstance(entry, dict):
        raise DataError(f'{where}: expected a JSON object, found {type(entry).__name__}; write {{"id": ..., "segments": [...]}}')
    where = f"{where} (sample {_required(entry, 'id', (str, int), where=where)!r})"
    segments = _required(entry, "segments", (list,), where=where)
    if not segments:
        raise DataError(f"{where}: 'segments' is empty; give the sample a segment or remove the line")
    parsed = tuple(_parse_segment(segment, where=f"{where}, segment {index}") for index, segment in enumerate(segments))
    return ManifestLine(where, parsed)


def _parse_segment(segment: Any, *, where: str) -> TextSegment | ImageSegment | AudioSegment:
    if not isinstance(segment, dict):
        raise DataError(f"{where}: expected a JSON object with a 'type', found {type(segment).__name__}")
    kind = _required(segment, "type", (str,), where=where)
    if kind == "text":
        role = _required(segment, "role", (str,), where=where)
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}")
        return TextSegment(role, _required(segment, "text", (str,), where=where))
    if kind == "image":
        path, size = _required(segment, "path", (str,), where=where), _parse_size(segment, where=where)
        return ImageSegment(path, size, is_answer=segment.get("role") == "assistant")
    if kind == "audio":
        return AudioSegment(_required(segment, "path", (str,), where=where))
    raise DataError(f"{where}: unknown segment type {kind!r}; use one of {', '.join(SEGMENT_TYPES)}")


def _parse_size(segment: dict[str, Any], *, where: str) -> tuple[int, int] | None:
    size = segment.get("width"), segment.get("height")
    if size == (None, None):
        return None
    width, height = size
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size):
        raise DataError(
            f"{where}: width and height must be positive whole numbers, found {width!r} and {height!r}; correct or remove both"
        )
    return width, height  # type: ignore[return-value]


def _required(entry: dict[str, Any], key: str, kinds: tuple[type, ...], *, where: str) -> Any:
    if key not in entry:
        raise DataError(f"{where}: the key '{key}' is missing; found {', '.join(map(repr, entry)) or 'no keys'}")
    if not isinstance(entry[key], kinds):
        expected = " or ".join({"str": "text", "int": "a number", "list": "a list"}[kind.__name__] for kind in kinds)
        raise DataError(f"{where}: '{key}' must be {expected}, found {type(entry[key]).__name__}")
    return entry[key]
