"""Chat samples in common formats: `messages` (role, content) and LLaVA's `conversations` (from, value).

Images are named by parts of a message's content (`{"type": "image", "image": PATH}`), or stand in the sample's own `image` or
`images`, in the order of the marks `<image>` in its texts (or of parts `{"type": "image"}` without a path). Likewise sound:
`audio`, `audios`, `<audio>`. A key or a mark that would be left out of training is an error.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from multimodal.data.conversation import TextSegment
from multimodal.data.forms.known_keys import check_keys
from multimodal.data.forms.segments import (
    EMBEDDED,
    AudioSegment,
    ImageSegment,
    Segment,
    SegmentedSample,
    check_path,
    required,
    shown,
    shown_keys,
)
from multimodal.values.errors import DataError

_MARK = re.compile("<(image|audio)>")
_OTHER_MARK = re.compile(
    r"<\|?(?:image|img|imagehere|audio|audiohere|sound|speech|video|frame)(?:[_ -]?(?:\d+|pad|here|token|placeholder))?\|?>",
    re.IGNORECASE,
)
"""Marks of other programs where media belong."""
_ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_PATH_KEYS = ("path", "image", "audio", "url", "image_url", "audio_url")
"""Keys under which a part of a message names its file."""
_Listed = Mapping[str, Iterator[str]]
"""image, audio -> the paths that the sample lists and no place has taken yet."""
_SEGMENTS: Mapping[str, type[ImageSegment] | type[AudioSegment]] = {"image": ImageSegment, "audio": AudioSegment}


def parse_chat_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample:
    """Return the sample of an object with `messages` or `conversations`.

    Raises DataError, which names `where`, for roles that are unknown or out of order, an empty conversation, unknown kinds of
    parts, keys and marks, and a number of images, or clips, that differs from the number of places for them.
    """
    if isinstance(entry.get("id"), (str, int)):
        where = f"{where} (sample {shown(entry['id'])})"
    key, role_key, text_key = (
        ("messages", "role", "content") if entry.get("messages") is not None else ("conversations", "from", "value")
    )
    messages = required(entry, key, (list,), where=where)
    if not messages:
        raise DataError(f"{where}: '{key}' is empty; give the sample a question and an answer, or remove it")
    check_keys(entry, (key, *(name for kind in _SEGMENTS for name in (kind, f"{kind}s"))), where=where)
    paths = {kind: _listed_paths(entry, kind, where=where) for kind in _SEGMENTS}
    listed = {kind: iter(found) for kind, found in paths.items()}
    segments: list[Segment] = []
    previous = ""
    for index, message in enumerate(messages):
        here = f"{where}, {key}[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{here}: expected an object with '{role_key}' and '{text_key}', found {type(message).__name__}")
        check_keys(message, (role_key, text_key), where=here)
        previous = _next_role(message, role_key, previous=previous, where=here)
        segments += _content(message, text_key, role=previous, listed=listed, where=here)
    for kind, found in paths.items():
        _check_all_taken(kind, num_listed=len(found), num_left=len(list(listed[kind])), where=where)
    _check_answered(segments, where=where)
    return SegmentedSample(where, tuple(segments))


def _listed_paths(entry: dict[str, Any], kind: str, *, where: str) -> list[str]:
    """Return the paths in `image` and `images`, or `audio` and `audios`, each of which has one or several."""
    listed: list[Any] = []
    for key in (kind, f"{kind}s"):
        value = entry.get(key)
        listed += value if isinstance(value, list) else [] if value is None else [value]
    for path in listed:
        if not isinstance(path, str):
            raise DataError(f"{where}: an {kind} must be the path of a file, found {shown(path)}; correct it")
    return [_local_path(path, where=where) for path in listed]


def _next_role(message: dict[str, Any], key: str, *, previous: str, where: str) -> str:
    spelled = required(message, key, (str,), where=where)
    role = _ROLES.get(spelled)
    if role is None:
        raise DataError(f"{where}: unknown {key} {spelled!r}; use one of {', '.join(_ROLES)}, or remove the sample")
    expected = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",)}[previous]
    if role not in expected:
        place = f"follows the {previous}'s" if previous else "comes first"
        raise DataError(
            f"{where}: roles out of order: a message of the {role} {place}, expected one of the {' or the '.join(expected)}; "
            "put them in order, or remove the sample"
        )
    return role


def _content(message: dict[str, Any], key: str, *, role: str, listed: _Listed, where: str) -> Iterator[Segment]:
    content = required(message, key, (str, list), where=where)
    if isinstance(content, str):
        yield from _marked_text(content, role=role, listed=listed, where=where)
        return
    for index, part in enumerate(content):
        yield _part(part, role=role, listed=listed, where=f"{where}.{key}[{index}]")


def _marked_text(text: str, *, role: str, listed: _Listed, where: str) -> Iterator[Segment]:
    """Cut a text at its marks; a newline between the text and a mark at either end belongs to the mark."""
    pieces, kinds = _MARK.split(text)[::2], _MARK.findall(text)
    if (other := next((found for piece in pieces for found in _OTHER_MARK.findall(piece)), None)) is not None:
        raise DataError(
            f"{where}: unknown mark {other}, at which nothing would be seen or heard; write <image> or <audio> and list the "
            f'file, remove the sample, or, where the text means these letters, make it a part: [{{"type": "text", "text": ...}}]'
        )
    for index, piece in enumerate(pieces):
        if index:
            yield _take(listed, kinds[index - 1], where=where)
        if index and not "".join(pieces[:index]).strip():
            piece = piece.removeprefix("\n")
        if index + 1 < len(pieces) and not "".join(pieces[index + 1 :]).strip():
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            yield TextSegment(role, piece)


def _part(part: Any, *, role: str, listed: _Listed, where: str) -> Segment:
    if not isinstance(part, dict):
        raise DataError(f"{where}: expected an object with a 'type', found {type(part).__name__}; correct it")
    part = {name: value for name, value in part.items() if value is not None}
    kind = required(part, "type", (str,), where=where).removesuffix("_url")
    if kind == "text":
        check_keys(part, ("type", "text"), where=where)
        return TextSegment(role, required(part, "text", (str,), where=where))
    if kind not in ("image", "audio"):
        raise DataError(f"{where}: unknown type {kind!r}; use text, image or audio, or remove the sample")
    named = [part[name] for name in _PATH_KEYS if name in part]
    check_keys(part, ("type", "detail", *[name for name in _PATH_KEYS if part.get(name) in named[:1]]), where=where)
    if not named:
        return _take(listed, kind, where=where)
    path = named[0].get("url") if named and isinstance(named[0], dict) else next(iter(named), None)
    if not isinstance(path, str):
        raise DataError(f"{where}: no path of a file in {shown_keys(part)}; add '{kind}' with the path, or remove the sample")
    return _SEGMENTS[kind](_local_path(path, where=where))


def _take(listed: _Listed, kind: str, *, where: str) -> Segment:
    path = next(listed[kind], None)
    if path is None:
        raise DataError(
            f"{where}: a place for an {kind} (<{kind}>), but the sample lists no more of them ('{kind}' or '{kind}s'); list it, "
            "or remove the mark"
        )
    return _SEGMENTS[kind](path)


def _local_path(path: str, *, where: str) -> str:
    if path.startswith(EMBEDDED):
        return path
    path = path.removeprefix("file://")
    if path.startswith(("http://", "https://", "data:")):
        raise DataError(f"{where}: {path[:60]} is no path of a file, and nothing is downloaded; save it beside the data")
    return check_path(path, where=where)


def _check_all_taken(kind: str, *, num_listed: int, num_left: int, where: str) -> None:
    if num_left:
        raise DataError(
            f"{where}: {num_listed} {kind}s are listed, but there are places (<{kind}>) for {num_listed - num_left} alone; add "
            f"marks where the {kind}s belong, or remove {kind}s"
        )


def _check_answered(segments: list[Segment], *, where: str) -> None:
    if not any(isinstance(segment, TextSegment) and segment.role == "assistant" for segment in segments):
        raise DataError(f"{where}: the assistant never answers, so there is nothing to learn; add an answer or remove the sample")
