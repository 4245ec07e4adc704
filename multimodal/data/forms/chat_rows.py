"""Chat samples in common formats: `messages` (role, content) and LLaVA's `conversations` (from, value).

Images are named by parts of a message's content (`{"type": "image", "image": PATH}`), or stand in the sample's own `image` or
`images`, in the order of the marks `<image>` in its texts (or of parts `{"type": "image"}` without a path).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from multimodal.data.conversation import TextSegment
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

MARK = "<image>"
_ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_PATH_KEYS = ("path", "image", "audio", "url", "image_url", "audio_url")
"""Keys under which a part of a message names its file."""
_Images = Iterator[str]


def parse_chat_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample:
    """Return the sample of an object with `messages` or `conversations`.

    Raises DataError, which names `where`, for roles that are unknown or out of order, an empty conversation, unknown kinds of
    parts, and a number of images that differs from the number of places for them.
    """
    if isinstance(entry.get("id"), (str, int)):
        where = f"{where} (sample {shown(entry['id'])})"
    key, role_key, text_key = (
        ("messages", "role", "content") if entry.get("messages") is not None else ("conversations", "from", "value")
    )
    messages = required(entry, key, (list,), where=where)
    if not messages:
        raise DataError(f"{where}: '{key}' is empty; give the sample a question and an answer, or remove it")
    paths = _listed_images(entry, where=where)
    images = iter(paths)
    segments: list[Segment] = []
    previous = ""
    for index, message in enumerate(messages):
        here = f"{where}, {key}[{index}]"
        if not isinstance(message, dict):
            raise DataError(f"{here}: expected an object with '{role_key}' and '{text_key}', found {type(message).__name__}")
        previous = _next_role(message, role_key, previous=previous, where=here)
        segments += _content(message, text_key, role=previous, images=images, where=here)
    _check_complete(segments, num_listed=len(paths), num_left=len(list(images)), where=where)
    return SegmentedSample(where, tuple(segments))


def _listed_images(entry: dict[str, Any], *, where: str) -> list[str]:
    """Return the paths in `image` and `images`, each of which has one or several."""
    listed: list[Any] = []
    for key in ("image", "images"):
        value = entry.get(key)
        listed += value if isinstance(value, list) else [] if value is None else [value]
    for path in listed:
        if not isinstance(path, str):
            raise DataError(f"{where}: an image must be the path of a file, found {shown(path)}; correct it")
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


def _content(message: dict[str, Any], key: str, *, role: str, images: _Images, where: str) -> Iterator[Segment]:
    content = required(message, key, (str, list), where=where)
    if isinstance(content, str):
        yield from _marked_text(content, role=role, images=images, where=where)
        return
    for index, part in enumerate(content):
        yield _part(part, role=role, images=images, where=f"{where}.{key}[{index}]")


def _marked_text(text: str, *, role: str, images: _Images, where: str) -> Iterator[Segment]:
    """Cut a text at its marks; a newline between the text and a mark at either end belongs to the mark."""
    pieces = text.split(MARK)
    for index, piece in enumerate(pieces):
        if index:
            yield ImageSegment(_take(images, where=where))
        if index and not "".join(pieces[:index]).strip():
            piece = piece.removeprefix("\n")
        if index + 1 < len(pieces) and not "".join(pieces[index + 1 :]).strip():
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            yield TextSegment(role, piece)


def _part(part: Any, *, role: str, images: _Images, where: str) -> Segment:
    if not isinstance(part, dict):
        raise DataError(f"{where}: expected an object with a 'type', found {type(part).__name__}; correct it")
    part = {name: value for name, value in part.items() if value is not None}
    kind = required(part, "type", (str,), where=where).removesuffix("_url")
    if kind == "text":
        return TextSegment(role, required(part, "text", (str,), where=where))
    if kind not in ("image", "audio"):
        raise DataError(f"{where}: unknown type {kind!r}; use text, image or audio, or remove the sample")
    named = [part[name] for name in _PATH_KEYS if name in part]
    if not named and kind == "image":
        return ImageSegment(_take(images, where=where))
    path = named[0].get("url") if named and isinstance(named[0], dict) else next(iter(named), None)
    if not isinstance(path, str):
        raise DataError(f"{where}: no path of a file in {shown_keys(part)}; add '{kind}' with the path, or remove the sample")
    path = _local_path(path, where=where)
    return ImageSegment(path) if kind == "image" else AudioSegment(path)


def _take(images: _Images, *, where: str) -> str:
    path = next(images, None)
    if path is None:
        raise DataError(
            f"{where}: a place for an image ({MARK}), but the sample lists no more images ('image' or 'images'); list it, or "
            "remove the mark"
        )
    return path


def _local_path(path: str, *, where: str) -> str:
    if path.startswith(EMBEDDED):
        return path
    path = path.removeprefix("file://")
    if path.startswith(("http://", "https://", "data:")):
        raise DataError(f"{where}: {path[:60]} is no path of a file, and nothing is downloaded; save it beside the data")
    return check_path(path, where=where)


def _check_complete(segments: list[Segment], *, num_listed: int, num_left: int, where: str) -> None:
    if num_left:
        raise DataError(
            f"{where}: {num_listed} images are listed, but there are places ({MARK}) for {num_listed - num_left} alone; add "
            "marks where the images belong, or remove images"
        )
    if not any(isinstance(segment, TextSegment) and segment.role == "assistant" for segment in segments):
        raise DataError(f"{where}: the assistant never answers, so there is nothing to learn; add an answer or remove the sample")
