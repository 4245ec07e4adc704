"""Opens the data at --data-path, whose form follows from its files: a manifest, chats in JSON, a Hugging Face data set, tars."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from multimodal.data.conversation import ROLES, TextSegment
from multimodal.data.forms.chat_rows import parse_chat_entry, parse_document_entry
from multimodal.data.forms.segments import (
    EMBEDDED,
    LOSS_WEIGHT,
    MEDIA,
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
from multimodal.data.forms.table_files import TableFiles, digest_files, find_table_files
from multimodal.data.forms.tar_files import TarFiles, find_tar_files
from multimodal.data.remote import DataPath, RemoteOptions, RemotePath, Result, Value, at_once, data_path, is_address
from multimodal.data.sample_source import file_digest
from multimodal.values.errors import DataError

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""The first bytes of gzip, zstd, bzip2 and xz files."""
_DECODER = json.JSONDecoder()
_LINES_READ = 2**22
"""Bytes of lines that are read at once."""
_SPACE = " \t\r\n"


class JsonFile:
    """The objects of one file: a manifest, or chats."""

    def __init__(self, path: DataPath, *, is_list: bool) -> None:
        """is_list: True if they are in one list, else each is on a line."""
        self._path, self._is_list = path, is_list

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each object and its line; raises DataError, with the line, for what is no object, or cannot be read."""
        path = self._path
        try:
            for number, value in _list_values(path) if self._is_list else _line_values(path):
                if not isinstance(value, dict):
                    raise DataError(
                        f"{path}, line {number}: expected a JSON object, found {type(value).__name__}; write "
                        '{"id": ..., "segments": [...]}, or an object with "messages" or "conversations"'
                    )
                yield f"line {number}", value
        except OSError as problem:
            raise DataError(f"{path}: cannot be read ({problem.strerror}); make it readable or give other data") from problem

    def digest(self) -> str:
        """Digest the whole content; of a remote file, length and version."""
        if isinstance(self._path, RemotePath):
            return digest_files(self._path.parent, [self._path])
        status = self._path.stat()
        return _content_digest(self._path, status.st_size, status.st_mtime_ns)

    def embedded(self, address: str, *, block: int) -> BinaryIO:
        """JSON embeds no images."""
        raise DataError(f"{self._path}: holds no images, and so none at {address!r}; name a file")


@lru_cache(maxsize=4)
def _content_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Digest a file once, as long as it does not change."""
    return file_digest(path)


def _line_values(path: DataPath) -> Iterator[tuple[int, Any]]:
    with path.open("rb", _LINES_READ) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                value = json.loads(raw)
            except (ValueError, RecursionError) as problem:  # from JSON, from UTF-8, or from deep nesting
                if number == 1 and raw.startswith(_COMPRESSED):
                    raise DataError(f"{path}, line 1: the manifest is compressed, expected JSON; unpack it first") from None
                if number == 1 and not raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
                    begin = raw[:60].decode(errors="replace").strip()
                    raise DataError(
                        f"{path}, line 1: is no JSON: it begins with {begin!r}; give --data-path JSON with 'messages' or "
                        "'conversations' (a table of texts: write each row as such an object), a manifest.jsonl, or .parquet "
                        "files"
                    ) from None
                raise DataError(
                    f"{path}, line {number}: not a complete JSON object ({problem}); the line is cut off or damaged: restore "
                    "it or remove it"
                ) from problem
            yield number, value


def _list_values(path: DataPath) -> Iterator[tuple[int, Any]]:
    """Decode the entries of a list one by one, so that only the text and one entry are in memory."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: is no UTF-8 ({problem}); save it as UTF-8") from problem
    place, number, seen, is_open = _behind_space(text, text.index("[") + 1), 1, 0, False
    while is_open or text[place : place + 1] != "]":
        number, seen = number + text.count("\n", seen, place), place
        where = f"{path}, line {number}"
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as problem:
            raise DataError(f"{where}: no complete JSON value ({problem}); the list is cut off or damaged: restore it") from None
        yield number, value
        place = _behind_space(text, place)
        if is_open := text[place : place + 1] == ",":
            place = _behind_space(text, place + 1)
        elif text[place : place + 1] != "]":
            raise DataError(f"{where}: behind this entry of the list is neither ',' nor ']'; the list is cut off: restore it")
    if (rest := _behind_space(text, place + 1)) < len(text):
        line = 1 + text.count("\n", 0, rest)
        raise DataError(f"{path}, line {line}: {text[rest : rest + 20]!r} follows the list; join lists into one, or remove it")


def _behind_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place


_OF_A_FILE = ("type", "path", "unit")
_KEYS = {"text": ("type", "role", "text"), "image": (*_OF_A_FILE, "role"), "audio": (*_OF_A_FILE, "role"), "video": _OF_A_FILE}
"""Kind of segment -> its keys, beside METADATA."""


def parse_manifest_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample:
    """Return the sample of a manifest's line.

    A line is `{"id": ..., "segments": [...]}`. A segment is `{"type": "text", "role": user | assistant | document | system,
    "text": ...}`, `{"type": "image", "path": ..., "width": ..., "height": ...}` (the size may be left out), `{"type": "audio",
    "path": ...}` or `{"type": "video", "path": ...}`. An image or a clip with `"role": "assistant"` is an answer, which a
    generator learns to make. `"unit"` names the unit of an item, if several might take it; `"loss_weight"` beside the segments
    multiplies the loss of the sample's tokens. Raises DataError naming the line for any key beside these and METADATA.
    """
    sample_id = required(entry, "id", (str, int), where=where)
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
    if kind not in MEDIA:
        raise DataError(f"{where}: unknown segment type {kind!r}; use one of {', '.join(_KEYS)}")
    if (role := segment.get("role")) not in (None, *ROLES):
        raise DataError(f"{where}: unknown role {role!r}; use one of {', '.join(ROLES)}, or leave it out")
    path = check_path(required(segment, "path", (str,), where=where), where=where)
    unit = None if segment.get("unit") is None else required(segment, "unit", (str,), where=where)
    size: Any = (segment.get("width"), segment.get("height")) if kind == "image" else (None, None)
    is_known = size != (None, None)
    if is_known and not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in size):
        raise DataError(
            f"{where}: width and height must be positive whole numbers, found {shown(size[0])} and {shown(size[1])}; "
            "correct or remove both"
        )
    return FileSegment(kind, path, unit, role == "assistant", size if is_known else None)


MANIFEST_NAME = "manifest.jsonl"
_FORMS = (
    "a manifest.jsonl, JSON lines with 'messages', JSON with LLaVA's 'conversations', or a folder that save_to_disk of Hugging "
    "Face's datasets wrote, its .parquet files, or WebDataset's .tar files"
)
_PARQUET, _TAR = b"PAR1", b"ustar"
_TAR_MARK = slice(257, 262)
"""Where an archive says in its first header that it is one."""
_ARCHIVES = ((b"PK\x03\x04", "a zip archive"), (b"\x89HDF", "an HDF5 file"))
_TURN = ("user", "assistant")


class SampleFiles:
    """The samples at a data path, in order."""

    def __init__(self, path: DataPath, files: JsonFile | TableFiles | TarFiles, remote: RemoteOptions) -> None:
        """path: the file or folder, for messages."""
        self.path, self._files, self._remote = path, files, remote

    @cached_property
    def folder(self) -> DataPath:
        """The folder that paths of images are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def digest(self) -> str:
        """A digest of the content, wherever it is: of all JSON, of the beginnings and ends of files that may have terabytes."""
        try:
            return self._files.digest()
        except OSError as problem:
            raise DataError(f"{self.path}: cannot be read ({problem}); copy the data again") from problem

    def samples(self) -> Iterator[SegmentedSample]:
        """Read and check all samples; raises DataError, behind the last sample for an id that a manifest has twice."""
        ids = array("q")  # 8 bytes a sample
        for place, row in self._files.rows():
            sample = parse_entry(row, where=f"{self.path}, {place}")
            if row.get("segments"):
                ids.append(hash(row["id"]))
            if any(isinstance(segment, TextSegment) and f"{EMBEDDED}[" in segment.text for segment in sample.segments):
                raise DataError(f"{sample.where}: has bytes where a text belongs; write it as a text")
            yield sample
        hashes = np.frombuffer(ids or array("q", (0,)), np.int64)
        hashes.sort()
        if repeated := {*hashes[1:][hashes[1:] == hashes[:-1]].tolist()}:
            self._check_ids(repeated)

    def _check_ids(self, repeated: set[int]) -> None:
        """Raise DataError for an id that is there twice, among those with these hashes."""
        place_of_id: dict[Any, str] = {}
        for place, row in self._files.rows():
            sample_id = row.get("id")
            if not isinstance(sample_id, str | int) or hash(sample_id) not in repeated:
                continue
            if place_of_id.setdefault(sample_id, place) != place:
                raise DataError(
                    f"{self.path}, {place}: the id {shown(sample_id)} is already that of {place_of_id[sample_id]}; give "
                    "every sample an id of its own, or remove what is there twice"
                )

    def open_item(self, path: str, *, block: int = 0, where: str) -> BinaryIO | None:
        """Open an item that is part of the data or remote; None for a file of this machine.

        path: of an item, full; block: bytes that are read at once of what is remote, where that is not all; 0: all. Raises
        DataError, which names the sample (`where`) if there is no such file.
        """
        try:
            if path.startswith(EMBEDDED):
                return self._files.embedded(path, block=block)
            if not is_address(path):
                return None
            found = data_path(path, self._remote)
            return found.open("rb", block) if block else BytesIO(found.read_bytes())
        except FileNotFoundError as problem:
            raise DataError(f"{where}: {problem.filename} does not exist; restore the file or remove that line") from problem

    def is_remote(self, path: str) -> bool:
        """Return True for an item that is read from a server by itself; of remote tables groups of rows are."""
        return is_address(path) or (path.startswith(EMBEDDED) and isinstance(self._read_at_once_in, RemotePath))

    def at_once(self, function: Callable[[Value], Result], values: Iterable[Value]) -> list[Result]:
        """Return the results for all values, several at a time where `function` waits for remote items."""
        return at_once(function, values, among=self._read_at_once_in)

    @property
    def _read_at_once_in(self) -> DataPath:
        """The data's folder, or this machine's for tables, of which a process reads one group of rows at a time."""
        return Path() if isinstance(self._files, TableFiles) else self.folder


def parse_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample:
    """Return the sample of one object in any form; raises DataError."""
    if entry.get("messages") is not None or entry.get("conversations") is not None:
        return parse_chat_entry(entry, where=where)
    for asking, more, answering in (("instruction", "input", "output"), ("query", "", "response")):  # Alpaca, ms-swift
        if entry.keys() >= {asking, answering}:
            rest = {key: value for key, value in entry.items() if key not in (asking, more, answering, "history")}
            asked = [required(entry, key, (str,), where=where) for key in (asking, more) if entry.get(key)]
            history = entry.get("history") or []
            turns = [*(history if isinstance(history, list) else [history]), ("\n".join(asked), entry[answering])]
            if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
                raise DataError(f"{where}: 'history' must be a list of pairs of question and answer; correct it")
            said = [{"role": role, "content": text} for turn in turns for role, text in zip(_TURN, turn, strict=True)]
            return parse_chat_entry({**rest, "messages": said}, where=where)
    if (document := parse_document_entry(entry, where=where)) is not None:
        return document
    if isinstance(entry.get("texts"), list):
        return parse_chat_entry(_of_texts(entry, where=where), where=where)
    if isinstance(entry.get("text"), str) and "segments" not in entry:
        check_keys(entry, ("text", LOSS_WEIGHT), where=where)
        return SegmentedSample(where, (TextSegment("document", entry["text"]),), loss_weight(entry, where=where))
    if "segments" in entry or "id" in entry:
        return parse_manifest_entry(entry, where=where)
    raise DataError(
        f"{where}: the key 'id' is missing; found {shown_keys(entry)}; expected 'id' and 'segments' (a "
        "manifest), 'messages' (chats), 'conversations' (LLaVA), 'texts' (FineVision, OBELICS), 'text_list' (MMC4) or 'text'; "
        "see docs/data.md"
    )


def _of_texts(entry: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a row of FineVision as a chat: pairs of user and assistant; images without marks stand before the first text."""
    images = entry.get("images") or []
    images, said = images if isinstance(images, list) else [images], list[dict[str, Any]]()
    has_marks = any(isinstance(pair, dict) and "<image>" in str(pair.get("user")) for pair in entry["texts"])
    for pair in entry["texts"]:
        if not (isinstance(pair, dict) and pair.keys() == {*_TURN}):
            raise DataError(f"{where}: 'texts' must be a list of pairs of 'user' and 'assistant'; correct it")
        said += ({"role": role, "content": pair[role] if has_marks else [{"type": "text", "text": pair[role]}]} for role in _TURN)
    if said and not has_marks:
        said[0]["content"][:0] = [{"type": "image"}] * len(images)
    rest = {key: value for key, value in entry.items() if key != "texts" and not key.endswith(("_ratings", "_min"))}
    return {**rest, "images": images, "messages": said}


def open_sample_files(path: str | DataPath, remote: RemoteOptions | None = None) -> SampleFiles:
    """Open the data at a path in the form that it has; raises DataError if it is missing or in none. remote: how to read it."""
    path = data_path(path, remote)
    if isinstance(path, RemotePath) and "?" in path.address and path.address.startswith("http"):
        plain = path.address.partition("?")[0]
        raise DataError(f"{plain}: leave the query behind it out, which logs and checkpoints would name, or serve it without one")
    remote = remote or (path.options if isinstance(path, RemotePath) else RemoteOptions())
    if not path.is_file() and (path / MANIFEST_NAME).is_file():
        path = path / MANIFEST_NAME
    if path.is_file():
        return SampleFiles(path, _open_file(path), remote)
    if (files := find_tar_files(path) or (find_table_files(path) if path.exists() else None)) is not None:
        return SampleFiles(path, files, remote)
    if path.is_dir():
        inside = sorted(found.name for found in path.iterdir() if not found.name.startswith("."))
        raise DataError(
            f"{path / MANIFEST_NAME}: no such manifest; give --data-path {_FORMS}. In the folder there is "
            f"{', '.join(inside[:5]) or 'nothing'}{' and more' if len(inside) > 5 else ''}"
        )
    raise DataError(f"{path}: no such manifest; give --data-path {_FORMS}")


def _open_file(path: DataPath) -> JsonFile | TableFiles | TarFiles:
    """Open one file in the form that its first bytes tell; raises DataError for one that is none, or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(_TAR_MARK.stop)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); make it readable or give other data") from problem
    if start[_TAR_MARK] == _TAR:
        return TarFiles(path.parent, [path])
    if start.startswith(_PARQUET):
        return TableFiles(path.parent, [path], is_arrow=False)
    if (found := next((kind for magic, kind in _ARCHIVES if start.startswith(magic)), None)) is not None:
        raise DataError(f"{path}: is {found}; unpack it, and give --data-path {_FORMS}")
    return JsonFile(path, is_list=start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[")
