"""Samples of ordered segments, which every form of data is read as, and the checks that all forms share."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from multimodal.data.conversation import TextSegment
from multimodal.values.errors import DataError

LOSS_WEIGHT = "loss_weight"
EMBEDDED = "\0"
"""Prefix of the path of an item that is not a file but part of the data itself."""


class EmbeddedAddress(str):
    """Such a path, made by whoever reads the data; a text in the data that begins alike is none."""

    __slots__ = ()


MEDIA = ("image", "audio", "video")


class FileSegment(NamedTuple):
    """A file with an image, with sound, or with a video, which is seen as some of its frames, each an image."""

    kind: str
    """One of MEDIA."""
    path: str
    """The path as the data spells it, relative to the data's folder; or EMBEDDED and the place in the data."""
    unit: str | None = None
    """The unit that takes it; None: the only unit that takes its kind, or makes it."""
    is_answer: bool = False
    size: tuple[int, int] | None = None
    """(width, height) of an image in pixels, if the data gives it."""


Segment = TextSegment | FileSegment


class SegmentedSample(NamedTuple):
    """One sample as the data describes it."""

    where: str
    """File, line number and sample, for messages."""
    segments: tuple[Segment, ...]
    loss_weight: float = 1.0


def check_path(path: str, *, where: str) -> str:
    """Return the path if a file can have it; raises DataError otherwise."""
    if not path or "\0" in path or any("\ud800" <= letter <= "\udfff" for letter in path):
        raise DataError(f"{where}: no file can be called {path!r}; correct 'path' or remove the segment")
    return path


def required(entry: dict[str, Any], key: str, kinds: tuple[type, ...], *, where: str) -> Any:
    """Return the value of a key; raises DataError if it is missing or of another kind."""
    if key not in entry:
        raise DataError(f"{where}: the key '{key}' is missing; found {shown_keys(entry)}; add it, or remove the line")
    if not isinstance(entry[key], kinds) or isinstance(entry[key], bool):
        expected = " or ".join({"str": "text", "int": "a number", "list": "a list"}[kind.__name__] for kind in kinds)
        raise DataError(f"{where}: '{key}' must be {expected}, found {type(entry[key]).__name__}; correct it")
    return entry[key]


def loss_weight(entry: Mapping[str, Any], *, where: str) -> float:
    """Return the weight of a sample, 1 if it has none; raises DataError unless it is a number above 0."""
    weight = entry.get(LOSS_WEIGHT)
    weight = 1.0 if weight is None else weight
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < 1e30:
        raise DataError(f"{where}: '{LOSS_WEIGHT}' must be a number above 0, found {shown(weight)}; correct it, or leave it out")
    return float(weight)


def shown_keys(entry: dict[str, Any]) -> str:
    """Spell the keys of an object for a message."""
    return ", ".join(map(shown, entry)) or "no keys"


def shown(value: Any) -> str:
    """Spell a value of any length for a message."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to spell some of them
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


_DESCRIBING = """
    id idx index uid uuid hash source sources data_source dataset dataset_name subset split origin url license author avatarUrl
    version created timestamp title file_name filename views category type task task_type subject topic domain modality body_part
    tags lang language difficulty quality score scores model model_name generator custom_instruction skip_prompt_formatting
    channel width height width_list height_list seconds duration sample_rate num_tokens num_turns token_count alt_captions
    metadata meta extra
"""
METADATA = frozenset(_DESCRIBING.split())
"""Keys that describe a sample, a message or a file, and are no part of what a model is taught; so are those that end in _id."""
_OF_FILES = ("image", "images", "audio", "audios", "video", "videos")


def check_keys(entry: Mapping[str, Any], known: Collection[str], *, where: str) -> None:
    """Raise DataError for a filled key that would be lost: neither known nor METADATA nor one's own (with an underscore)."""
    for key, value in entry.items():
        is_own = key in known or key in METADATA or key.startswith("_") or key.endswith("_id")
        if is_own or value is None or value in ([], {}, ""):
            continue
        remedy = "remove it, or put it under 'metadata' if it only describes the sample"
        remedy = "name one file, at one place" if key in _OF_FILES else remedy
        raise DataError(f"{where}: unknown key {shown(key)}, which training would lose without a word; {remedy}")
