"""Opens the data at --data-path, whose form follows from its files: a manifest, chats in JSON, a Hugging Face data set, tars."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from multimodal.data.conversation import TextSegment
from multimodal.data.forms.chat_rows import parse_chat_entry
from multimodal.data.forms.documents import parse_document_entry
from multimodal.data.forms.json_files import JsonFile
from multimodal.data.forms.manifest_lines import parse_manifest_entry
from multimodal.data.forms.segments import LOSS_WEIGHT, SegmentedSample, check_keys, loss_weight, shown_keys
from multimodal.data.forms.table_files import TableFiles, find_table_files
from multimodal.data.forms.tar_files import TarFiles, find_tar_files
from multimodal.values.errors import DataError

MANIFEST_NAME = "manifest.jsonl"
_FORMS = (
    "a manifest.jsonl, JSON lines with 'messages', JSON with LLaVA's 'conversations', or a folder that save_to_disk of Hugging "
    "Face's datasets wrote, its .parquet files, or WebDataset's .tar files"
)
_ARCHIVES = ((b"PK\x03\x04", "a zip archive"), (b"\x89HDF", "an HDF5 file"))


_TURN = ("user", "assistant")


class SampleFiles:
    """The samples at a data path, in order."""

    def __init__(self, path: Path, files: JsonFile | TableFiles | TarFiles) -> None:
        """path: the file or folder, for messages."""
        self.path, self._files = path, files

    @property
    def folder(self) -> Path:
        """The folder that paths of images are relative to."""
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def digest(self) -> str:
        """A digest of the content, wherever it is: of all JSON, of the beginnings and ends of files that may have terabytes."""
        return self._files.digest()

    def samples(self) -> Iterator[SegmentedSample]:
        """Read and check all samples; raises DataError."""
        place_of_id: dict[str | int, str] = {}
        for place, row in self._files.rows():
            yield parse_entry(row, place=place, where=f"{self.path}, {place}", place_of_id=place_of_id)

    def embedded(self, address: str) -> bytes:
        """Return the bytes of an item whose path begins with EMBEDDED; raises DataError."""
        return self._files.embedded(address)


def parse_entry(entry: dict[str, Any], *, place: str, where: str, place_of_id: dict[str | int, str]) -> SegmentedSample:
    """Return the sample of one object in any form; raises DataError."""
    if entry.get("messages") is not None or entry.get("conversations") is not None:
        return parse_chat_entry(entry, where=where)
    for asking, more, answering in (("instruction", "input", "output"), ("query", "", "response")):  # Alpaca, ms-swift
        if entry.keys() >= {asking, answering}:
            rest = {key: value for key, value in entry.items() if key not in (asking, more, answering, "history")}
            question = f"{entry[asking]}\n{entry[more]}" if entry.get(more) else entry[asking]
            turns = [*(entry.get("history") or ()), (question, entry[answering])]
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
        return parse_manifest_entry(entry, place=place, where=where, place_of_id=place_of_id)
    raise DataError(
        f"{where}: the key 'id' is missing; found {shown_keys(entry)}; expected 'id' and 'segments' (a manifest), 'messages' "
        "(chats), 'conversations' (LLaVA), 'texts' (FineVision, OBELICS), 'text_list' (MMC4) or 'text'; see docs/data.md"
    )


def _of_texts(entry: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a row of FineVision as a chat: pairs of user and assistant, and images, which stand before the first text."""
    images = entry.get("images") or []
    said: list[dict[str, Any]] = []
    for pair in entry["texts"]:
        if not (isinstance(pair, dict) and pair.keys() == {*_TURN}):
            raise DataError(f"{where}: 'texts' must be a list of pairs of 'user' and 'assistant'; correct it")
        said += ({"role": role, "content": [{"type": "text", "text": pair[role]}]} for role in _TURN)
    if said:
        said[0]["content"][:0] = [{"type": "image"}] * len(images)
    rest = {key: value for key, value in entry.items() if key != "texts" and not key.endswith(("_ratings", "_min"))}
    return {**rest, "images": images, "messages": said}


def open_sample_files(path: str | Path) -> SampleFiles:
    """Open the data at a path in the form that it has; raises DataError if it is missing or in another form."""
    path = Path(path)
    if path.is_dir() and (path / MANIFEST_NAME).is_file():
        path = path / MANIFEST_NAME
        return SampleFiles(path, JsonFile(path))
    if (files := find_tar_files(path) or (find_table_files(path) if path.exists() else None)) is not None:
        return SampleFiles(path, files)
    if path.is_dir():
        inside = sorted(found.name for found in path.iterdir() if not found.name.startswith("."))
        raise DataError(
            f"{path / MANIFEST_NAME}: no such manifest; give --data-path {_FORMS}. In the folder there is "
            f"{', '.join(inside[:5]) or 'nothing'}{' and more' if len(inside) > 5 else ''}"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such manifest; give --data-path {_FORMS}")
    if (found := _archive_kind(path)) is not None:
        raise DataError(f"{path}: is {found}; unpack it, and give --data-path {_FORMS}")
    return SampleFiles(path, JsonFile(path))


def _archive_kind(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); make it readable or give other data") from problem
    return next((kind for magic, kind in _ARCHIVES if start.startswith(magic)), None)
