"""Chat samples in common formats: `messages` or `conversations`, with turns of role and content, or LLaVA's of from and value.

Images are named by parts of a message's content (`{"type": "image", "image": PATH}`), or stand in the sample's own `image` or
`images`, in the order of the marks `<image>` in its texts (or of parts `{"type": "image"}` without a path). Likewise sound:
`audio`, `audios`, `<audio>`, and videos: `video`, `videos`, `<video>`. `loss_weight` beside the messages
multiplies the loss of the sample's tokens. A key or a mark that would be left out of training is an error.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from multimodal.data.conversation import TextSegment
from multimodal.data.forms.segments import (
    LOSS_WEIGHT,
    MEDIA,
    EmbeddedAddress,
    FileSegment,
    Segment,
    SegmentedSample,
    check_keys,
    check_path,
    loss_weight,
    required,
    shown,
    shown_keys,
)
from multimodal.values.errors import DataError

_MARK = re.compile("<(image|audio|video)>")
_OTHER_MARK = re.compile(
    r"<\|?(?:start_of_)?(?:image|img|audio|sound|speech|video|frame)"
    r"(?:[_ -]?(?:\d+|pad|here|token|soft_token|placeholder|context))?\|?>",
    re.IGNORECASE,
)
"""Marks of other programs where media belong."""
_HTML = frozenset(("<audio>", "<frame>", "<img>", "<video>"))
"""Marks that are HTML where no media belong."""
_ROLES: Mapping[str, str] = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_KEYS = (("role", "content"), ("from", "value"))
_LISTING = tuple(name for kind in MEDIA for name in (kind, f"{kind}s"))
"""Keys beside the messages that list files."""
_WEIGHTS = ("loss", "train", "weight")
"""Keys of messages that say whether they are learnt; all that assistants say is, and nothing else."""
_PATH_KEYS = ("path", "image", "audio", "video", "url", "image_url", "audio_url", "video_url")
"""Keys under which a part of a message names its file."""
_Listed = Mapping[str, deque[tuple[int, str]]]
"""image, audio, video -> the paths that the sample lists and no place has taken yet, with their numbers."""


def parse_chat_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample:
    """Return the sample of an object with `messages` or `conversations`; raises DataError, which names `where`, for faulty ones.

    Faults are roles that are unknown or out of order, empty conversations, unknown parts, keys and marks, and more or fewer files
    than places for them.
    """
    if isinstance(entry.get("id"), (str, int)):
        where = f"{where} (sample {shown(entry['id'])})"
    key = "messages" if entry.get("messages") is not None else "conversations"
    messages = required(entry, key, (list,), where=where)
    if not messages:
        raise DataError(f"{where}: '{key}' is empty; give the sample a question and an answer, or remove it")
    objects = [message for message in messages if isinstance(message, dict)]
    role_key, text_key = next((keys for keys in _KEYS if any(keys[0] in each for each in objects)), _KEYS[key != "messages"])
    said = [each[text_key] for each in objects if isinstance(each.get(text_key), str)]
    repeated = [name for name, value in entry.items() if isinstance(value, str) and value in said]
    check_keys(entry, (key, "system", LOSS_WEIGHT, *_LISTING, *repeated), where=where)
    paths = {kind: _listed_paths(entry, kind, where=where) for kind in MEDIA}
    listed = {kind: deque(enumerate(found)) for kind, found in paths.items()}
    turns = [(f"{where}, {key}[{index}]", message) for index, message in enumerate(messages)]
    if entry.get("system"):
        turns.insert(0, (f"{where}, system", {role_key: "system", text_key: entry["system"]}))
    segments: list[Segment] = []
    previous = ""
    for here, message in turns:
        if not isinstance(message, dict):
            raise DataError(f"{here}: expected an object with '{role_key}' and '{text_key}', found {type(message).__name__}")
        is_behind_answer, previous = previous == "assistant", _next_role(message, role_key, previous=previous, where=here)
        learnt = [name for name in _WEIGHTS if message.get(name) == (previous == "assistant")]
        check_keys(message, (role_key, text_key, *learnt), where=here)
        content = required(message, text_key, (str, list), where=here)
        if isinstance(content, str):
            own = [*_marked_text(content, role=previous, listed=listed, where=here)]
        else:
            parts = ((part, f"{here}.{text_key}[{index}]") for index, part in enumerate(content))
            own = [_part(part, role=previous, listed=listed, where=place) for part, place in parts]
        is_empty = not own and previous != "assistant"
        if is_empty or (is_behind_answer and not any(isinstance(each, TextSegment) for each in own)):
            segments.append(TextSegment(previous, ""))  # else there is no turn, and the next answer goes on with the one before
        segments += own
    for kind, found in paths.items():
        if listed[kind]:
            raise DataError(
                f"{where}: {len(found)} {kind}s are listed, but there are places (<{kind}>) for {len(found) - len(listed[kind])} "
                f"alone; add marks where the {kind}s belong, or remove {kind}s"
            )
    if not any(isinstance(segment, TextSegment) and segment.role == "assistant" for segment in segments):
        raise DataError(f"{where}: the assistant never answers, so there is nothing to learn; add an answer or remove the sample")
    return SegmentedSample(where, tuple(segments), loss_weight(entry, where=where))


def _listed_paths(entry: dict[str, Any], kind: str, *, where: str) -> list[str]:
    """Return the paths in `image` and `images`, say, each of which has one or several."""
    listed: list[Any] = []
    for key in (kind, f"{kind}s"):
        if (value := entry.get(key)) is not None:
            listed += value if isinstance(value, list) else [value]
    listed = [path_in(value) for value in listed]
    for path in listed:
        if not isinstance(path, str):
            raise DataError(f"{where}: {kind} must be the path of a file, found {shown(path)}; correct it")
    return [local_path(path, where=where) for path in listed]


def path_in(value: Any) -> Any:
    """Return the path in an object that has nothing else, as tables have them; any other value as it is."""
    filled = {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else {}
    return filled["path"] if filled.keys() == {"path"} else value


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


def _marked_text(text: str, *, role: str, listed: _Listed, where: str) -> Iterator[Segment]:
    """Cut a text at its marks; a newline between the text and a mark at either end belongs to the mark."""
    marks = [mark for mark in _MARK.finditer(text) if listed[mark[1]] or not _is_text(mark, role)]
    pieces = [text[start:end] for start, end in pairwise((0, *(side for mark in marks for side in mark.span()), len(text)))][::2]
    others = (mark for piece in pieces for mark in _OTHER_MARK.finditer(piece) if not _is_text(mark, role))
    if (other := next(others, None)) is not None:
        raise DataError(
            f"{where}: unknown mark {other[0]}, at which nothing would be seen or heard; write <image>, <audio> or <video> and "
            "list the file, remove the sample, or, where the text means these letters, make it a part: "
            '[{"type": "text", "text": ...}]'
        )
    for index, piece in enumerate(pieces):
        if index:
            yield _take(listed, marks[index - 1][1], where=where)
        if index and not "".join(pieces[:index]).strip():
            piece = piece.removeprefix("\n")
        if index + 1 < len(pieces) and not "".join(pieces[index + 1 :]).strip():
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            yield TextSegment(role, piece)


def _is_text(mark: re.Match[str], role: str) -> bool:
    """Return True if a mark is letters: between quotation marks, or HTML in an answer, in which no media belong."""
    before, behind = mark.string[: mark.start()][-1:], mark.string[mark.end() :][:1]
    return (before == behind and before in ("`", "'", '"')) or (role == "assistant" and mark[0].lower() in _HTML)


def _part(part: Any, *, role: str, listed: _Listed, where: str) -> Segment:
    if not isinstance(part, dict):
        raise DataError(f"{where}: expected an object with a 'type', found {type(part).__name__}; correct it")
    part = {name: value for name, value in part.items() if value is not None}
    kind = required(part, "type", (str,), where=where).removesuffix("_url")
    if kind == "text":
        check_keys(part, ("type", "text"), where=where)
        return TextSegment(role, required(part, "text", (str,), where=where))
    if kind not in MEDIA:
        raise DataError(f"{where}: unknown type {kind!r}; use text, {', '.join(MEDIA)}, or remove the sample")
    named = [part[name] for name in _PATH_KEYS if name in part]
    check_keys(part, ("type", "detail", *[name for name in _PATH_KEYS if part.get(name) in named[:1]]), where=where)
    if not named:
        return _take(listed, kind, number=part.get("index"), where=where)
    path = named[0].get("url") if isinstance(named[0], dict) else named[0]
    if not isinstance(path, str):
        raise DataError(f"{where}: no path of a file in {shown_keys(part)}; add '{kind}' with one, or remove the sample")
    return FileSegment(kind, local_path(path, where=where))


def _take(listed: _Listed, kind: str, *, number: int | None = None, where: str) -> Segment:
    """number: of the file, if the place tells it."""
    if not listed[kind]:
        raise DataError(
            f"{where}: a place for {kind} (<{kind}>), but the sample lists no more of them ('{kind}' or '{kind}s'); list it, "
            "or remove the mark"
        )
    place, path = listed[kind].popleft()
    if number not in (None, place):
        raise DataError(
            f"{where}: 'index' is {shown(number)}, but this is place {place} for {kind}; list the files in the order of "
            "their places, and leave 'index' out"
        )
    return FileSegment(kind, path)


def local_path(path: str, *, where: str) -> str:
    """Return a path without `file://`; raises DataError for files inside addresses and for what no file can be called."""
    if isinstance(path, EmbeddedAddress):
        return path
    path = path.removeprefix("file://")
    if path.startswith("data:"):
        raise DataError(f"{where}: {path[:60]} is no path of a file; save it beside the data")
    return check_path(path, where=where)


_OF_MMC4 = ("url", "similarity_matrix", "could_have_url_duplicate")


def parse_document_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample | None:
    """Return the sample of a row of either data set, or None for one of neither; raises DataError for faulty ones.

    OBELICS: `texts` and `images` of one length, one of which is null at each place. MMC4: `text_list`, and `image_info` with the
    `image_name` of each image and the `matched_text_index` of the text that it stands before.
    """
    if isinstance(entry.get("text_list"), list):
        check_keys(entry, ("text_list", "image_info", LOSS_WEIGHT, *_OF_MMC4), where=where)
        places = _places_of_mmc4(entry, where=where)
    elif isinstance(texts := entry.get("texts"), list) and texts and all(isinstance(each, str | None) for each in texts):
        check_keys(entry, ("texts", "images", "general_metadata", LOSS_WEIGHT), where=where)
        places = _places_of_obelics(texts, entry.get("images"), where=where)
    else:
        return None
    segments: list[Segment] = []
    for text, image in places:
        if image is not None and not isinstance(path := path_in(image), str):
            raise DataError(f"{where}: image must be the path of a file, found {shown(image)}; correct it")
        segments.append(TextSegment("document", text) if image is None else FileSegment("image", local_path(path, where=where)))
    if not any(isinstance(segment, TextSegment) for segment in segments):
        raise DataError(f"{where}: the document has no text, so there is nothing to learn; remove it")
    return SegmentedSample(where, tuple(segments), loss_weight(entry, where=where))


def _places_of_obelics(texts: list[str | None], images: Any, *, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(images, list) or len(images) != len(texts):
        raise DataError(f"{where}: 'texts' has {len(texts)} places, so 'images' must be a list of as many; correct it")
    for number, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise DataError(f"{where}: place {number} must be either a text or an image, and the other null; correct it")
        yield text or "", image


def _places_of_mmc4(entry: dict[str, Any], *, where: str) -> Iterator[tuple[str, Any]]:
    texts, found = entry["text_list"], entry.get("image_info") or []
    before: list[list[Any]] = [[] for _ in texts]
    for number, image in enumerate(found if isinstance(found, list) else [found]):
        place = image.get("matched_text_index") if isinstance(image, dict) else None
        if not isinstance(place, int) or not 0 <= place < len(texts) or image.get("image_name") is None:
            raise DataError(
                f"{where}: image_info[{number}] must have an 'image_name' and a 'matched_text_index' below {len(texts)}, the "
                "number of texts; correct it"
            )
        before[place].append(image["image_name"])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{where}: text_list[{number}] must be a text, found {shown(text)}; correct it")
        yield from (("", image) for image in before[number])
        yield text, None
