"""The manifest format: one JSON object per line, `{"id": ..., "segments": [...]}`, checked as it is read.

A segment is `{"type": "text", "role": user | assistant | document | system, "text": ...}`, `{"type": "image", "path": ...,
"width": ..., "height": ...}` (the size may be left out), `{"type": "audio", "path": ...}` or `{"type": "video", "path": ...}`. An
image with `"role": "assistant"` is an answer, which a generator learns to make. `"unit"` names the unit of an item, if several
might take it. Keys that only describe a sample (METADATA) are ignored. `"loss_weight"` beside the segments multiplies the loss of
the sample's tokens.
"""

from typing import Any

from multimodal.data.conversation import ROLES, TextSegment
from multimodal.data.forms.segments import (
    LOSS_WEIGHT,
    AudioSegment,
    ImageSegment,
    Segment,
    SegmentedSample,
    VideoSegment,
    check_keys,
    check_path,
    loss_weight,
    required,
    shown,
)
from multimodal.values.errors import DataError

_OF_A_FILE = ("type", "path", "unit")
_KEYS = {"text": ("type", "role", "text"), "image": (*_OF_A_FILE, "role"), "audio": _OF_A_FILE, "video": _OF_A_FILE}
"""Kind of segment -> its keys, beside METADATA."""


def parse_manifest_entry(entry: dict[str, Any], *, place: str, where: str, place_of_id: dict[str | int, str]) -> SegmentedSample:
    """Return the sample of a line; place_of_id: the line or row of every earlier id, to which this one is added.

    Raises DataError naming the line for anything but the format above, and for two samples with the same id.
    """
    sample_id = required(entry, "id", (str, int), where=where)
    if place_of_id.setdefault(sample_id, place) != place:
        raise DataError(
            f"{where}: the id {shown(sample_id)} is already that of {place_of_id[sample_id]}; give every sample an id "
            "of its own, or remove what is there twice"
        )
    where = f"{where} (sample {shown(sample_id)})"
    segments = required(entry, "segments", (list,), where=where)
    check_keys(entry, ("segments", LOSS_WEIGHT), where=where)
    if not segments:
        raise DataError(f"{where}: 'segments' is empty; give the sample a segment or remove the line")
    parsed = tuple(_parse_segment(segment, where=f"{where}, segment {index}") for index, segment in enumerate(segments))
    return SegmentedSample(where, parsed, loss_weight(entry, where=where))


def _parse_segment(segment: Any, *, where: str) -> Segment:
    if not isinstance(segment, dict):
        raise DataError(f"{where}: expected a JSON object with a 'type', found {type(segment).__name__}; correct it")
    kind = required(segment, "type", (str,), where=where)
    check_keys(segment, _KEYS.get(kind, segment), where=where)
    if kind == "text":
        role = required(segment, "role", (str,), where=where)
        if role not in ROLES:
            raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}")
        return TextSegment(role, required(segment, "text", (str,), where=where))
    if kind == "image":
        if (role := segment.get("role")) not in (None, *ROLES):
            raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}, or leave it out")
        path, size = _parse_path(segment, where=where), _parse_size(segment, where=where)
        return ImageSegment(path, size, is_answer=role == "assistant", unit=_parse_unit(segment, where=where))
    if kind in ("audio", "video"):
        return (AudioSegment if kind == "audio" else VideoSegment)(
            _parse_path(segment, where=where), _parse_unit(segment, where=where)
        )
    raise DataError(f"{where}: unknown segment type {kind!r}; use one of {', '.join(_KEYS)}")


def _parse_path(segment: dict[str, Any], *, where: str) -> str:
    return check_path(required(segment, "path", (str,), where=where), where=where)


def _parse_unit(segment: dict[str, Any], *, where: str) -> str | None:
    return None if segment.get("unit") is None else required(segment, "unit", (str,), where=where)


def _parse_size(segment: dict[str, Any], *, where: str) -> tuple[int, int] | None:
    size = segment.get("width"), segment.get("height")
    if size == (None, None):
        return None
    width, height = size
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size):
        raise DataError(
            f"{where}: width and height must be positive whole numbers, found {shown(width)} and {shown(height)}; "
            "correct or remove both"
        )
    return width, height  # type: ignore[return-value]
