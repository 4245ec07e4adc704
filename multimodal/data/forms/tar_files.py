"""WebDataset's tar archives, alone, in a folder, or with Energon's `.nv-meta`: read in place, not unpacked.

Files that follow each other and share a name up to its first dot are one sample: images, sound or videos, and a
`json` or `txt` beside them.
"""

import json
import os
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Self

import yaml

from multimodal.data.forms.segments import EMBEDDED, EmbeddedAddress, shown, shown_keys
from multimodal.data.forms.table_files import digest_files
from multimodal.data.remote import AT_ONCE, DataPath, at_once, name_in
from multimodal.values.errors import DataError

_MEDIA: Mapping[str, tuple[str, ...]] = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"),
    "audio": ("wav", "flac", "ogg", "mp3"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "m4v"),
}
_MEDIUM = {kind: medium for medium, kinds in _MEDIA.items() for kind in kinds}
_TEXTS = frozenset(("txt", "json"))
_READ = frozenset((*_MEDIUM, *_TEXTS, "cls", "id", "__key__"))
_PACKED = (".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
_FIELD = re.compile(r"^([^\[\]]+)((?:\[[^\[\]]+\])*)$")
"""A field of Energon's field_map: `jpg`, `json[caption]`, `json[turns][0][text]`."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_FIELDS: Mapping[str, tuple[str, ...]] = {"CaptioningSample": ("image", "caption"), "VQASample": ("image", "context", "answers")}
"""Energon's kinds of samples that are read, and what they need."""


class _Header(tarfile.TarInfo):
    """A member of which, if it is an ordinary file, only what is asked for here is read: that takes a third of the time."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the member of a header; tarfile itself reads those of other kinds, and says what is wrong with a damaged one."""
        size, total, ends = buf[124:135], buf[148:154], buf[135:136] + buf[154:156]
        is_ordinary = len(buf) == tarfile.BLOCKSIZE and buf[156:157] == tarfile.REGTYPE
        if not is_ordinary or (size + total).strip(b"01234567") or ends.strip(b"\0 "):
            return super().frombuf(buf, encoding, errors)
        if int(total, 8) != sum(buf) - sum(buf[148:156]) + 8 * ord(" "):
            return super().frombuf(buf, encoding, errors)
        name, prefix = (field.partition(b"\0")[0].decode(encoding, errors) for field in (buf[:100], buf[345:500]))
        member = cls(f"{prefix}/{name}" if prefix else name)
        member.size = int(size, 8)
        return member


class TarFiles:
    """The samples of tar archives, archive after archive."""

    def __init__(
        self,
        folder: DataPath,
        archives: Sequence[DataPath],
        *,
        fields: Mapping[str, str] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        """folder: of archives' names; fields: of Energon's field_map; left_out: samples, as ARCHIVE/KEY, that it excludes."""
        self._folder, self._archives, self._fields, self._left_out = folder, archives, fields, frozenset(left_out)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where a sample stands, and the sample as an object with `messages`; raises DataError."""
        for archive, members in self._read_archives():
            for key, found in groupby(members, key=lambda member: _split_name(member[0])[0]):
                where, name = f"{archive}, {key}", name_in(self._folder, archive)
                kinds = [(_split_name(member)[1], value) for member, value in found]
                if len(parts := dict(kinds)) < len(kinds):
                    raise DataError(f"{where}: has two files of a kind, of which one would be lost; give samples other names")
                if f"{name}/{key}" in self._left_out:
                    continue
                place = key if len(self._archives) == 1 else f"{name}, {key}"
                yield place, self._by_fields(parts, where=where) if self._fields else _by_names(parts, where=where)

    def embedded(self, address: str, *, block: int) -> BinaryIO:
        """Open the file at an address from `rows`; block: as for `SampleFiles.open_item`."""
        number, start, size = json.loads(address.removeprefix(EMBEDDED))
        archive = self._archives[number]
        if not isinstance(archive, Path):
            return archive.open_range(start, size, block=block) if block else BytesIO(archive.read_range(start, size))
        with archive.open("rb", buffering=0) as file:
            return BytesIO(os.pread(file.fileno(), size, start))

    def _read_archives(self) -> Iterator[tuple[DataPath, Iterable[tuple[str, Any]]]]:
        """Yield every archive with its files; of remote ones several are read at once."""
        numbered = [*enumerate(self._archives)]
        for first in range(0, len(numbered), AT_ONCE):
            some = numbered[first : first + AT_ONCE]
            if isinstance(self._folder, Path):
                yield from ((archive, self._members(number, archive)) for number, archive in some)
            else:
                read = at_once(lambda each: [*self._members(*each)], some, among=self._folder)
                yield from ((archive, members) for (_, archive), members in zip(some, read, strict=True))

    def digest(self) -> str:
        """Digest every archive's name, length, beginning and end."""
        return digest_files(self._folder, self._archives)

    def _members(self, number: int, archive: DataPath) -> Iterator[tuple[str, Any]]:
        """Yield the name of each file, and its text, or the address of its bytes."""
        size = archive.stat().st_size
        try:
            with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as opened:
                for member in opened:
                    opened.members = []  # type: ignore[attr-defined]  # which would grow with the archive
                    if member.isdir():
                        continue
                    if not member.isfile():
                        raise DataError(f"{archive}: {member.name} is a link, not a file; archive what it leads to")
                    if member.issparse():
                        raise DataError(f"{archive}: {member.name} is sparse; write the archive anew without tar's --sparse")
                    if member.offset_data + member.size > size:
                        raise DataError(f"{archive}: ends inside {member.name}; copy the archive again")
                    kind = member.name.rpartition(".")[2].lower()
                    if kind in _TEXTS:
                        file.seek(member.offset_data)
                        yield (
                            member.name,
                            _text(file.read(member.size), is_json=kind == "json", where=f"{archive}, {member.name}"),
                        )
                    else:
                        yield member.name, EmbeddedAddress(EMBEDDED + json.dumps((number, member.offset_data, member.size)))
                file.seek(end := opened.offset)  # type: ignore[attr-defined]  # where tarfile found no member, for whatever reason
                if not (rest := file.read(2 * tarfile.RECORDSIZE)) or any(rest):
                    found = "has other bytes, or another archive," if rest else "ends without the mark of its end"
                    raise DataError(f"{archive}: {found} behind byte {end:,}; copy the archive again, or write it anew")
        except (tarfile.TarError, OSError) as problem:
            raise DataError(f"{archive}: cannot be read ({problem}); copy the archive again") from problem

    def _by_fields(self, parts: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        fields = self._fields or {}
        found = {name: _field(parts, path, where=where) for name, path in fields.items() if name != "__key__"}
        answer = found.get("caption", found.get("answers"))
        answer = answer[0] if isinstance(answer, list) and answer else answer
        texts = found.get("context", ""), answer
        if others := [text for text in texts if not isinstance(text, str)]:
            raise DataError(f"{where}: {shown(others[0])} stands where field_map has a text; correct it, or exclude the sample")
        return _asked({"image": [found["image"]]}, *map(str, texts))


def find_tar_files(path: DataPath) -> TarFiles | None:
    """Return the archives in a folder, or None if there are none; FOLDER/SPLIT names a split of Energon's. Raises DataError."""
    for folder, split in ((path, None), (path.parent, path.name)):
        if (folder / ".nv-meta" / "split.yaml").is_file() and (split is None or not path.exists()):
            return _energon(folder, split)
    archives: list[DataPath] = sorted([*path.glob("*.tar")], key=str)
    if packed := [each for ending in _PACKED if archives for each in path.glob(f"*{ending}")]:
        raise DataError(f"{packed[0]}: would be left out, as it is compressed; unpack it, or move it to another folder")
    return TarFiles(path, archives) if archives else None


def _energon(folder: DataPath, split: str | None) -> TarFiles:
    meta = folder / ".nv-meta"
    described = _mapping(meta / "split.yaml")
    splits, left_out = described.get("split_parts"), {*_expanded(described.get("exclude"))}
    splits = {str(name): [*_expanded(files)] for name, files in splits.items() if files} if isinstance(splits, dict) else {}
    if split is None and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        choices = " or ".join(str(folder / name) for name in splits) or "a folder that energon has prepared"
        raise DataError(f"{folder}: a data set of the splits {', '.join(splits) or '(none)'}; give --data-path {choices}")
    archives = [folder / name for name in splits[split] if name not in left_out]
    root = folder.resolve()
    present = at_once(lambda each: each.is_file() and each.resolve().is_relative_to(root), archives, among=folder)
    if not all(present):
        missing = archives[present.index(False)]
        raise DataError(f"{meta / 'split.yaml'}: names {missing}, which is not in {folder}; copy the whole data set")
    samples = _mapping(meta / "dataset.yaml") if (meta / "dataset.yaml").is_file() else {}
    fields = samples.get("field_map")
    if program := samples.get("sample_loader") or (samples.get("part_filter") if fields is None else None):
        raise DataError(f"{meta / 'dataset.yaml'}: {shown(program)} is a program, and nothing in data is run; use a field_map")
    if fields is None:
        return TarFiles(folder, archives, left_out=left_out)
    kind = samples.get("sample_type", {})
    name = str(kind.get("__class__") if isinstance(kind, dict) else kind)
    if name not in _FIELDS or not isinstance(fields, dict) or not {*_FIELDS[name]} <= fields.keys():
        wanted = " or ".join(f"{each} with {', '.join(needed)}" for each, needed in _FIELDS.items())
        raise DataError(
            f"{meta / 'dataset.yaml'}: {name} with the field_map {shown(fields)} is not read; use {wanted}, or leave it out "
            "where the samples' json holds 'messages' or 'conversations'"
        )
    return TarFiles(folder, archives, fields={str(key): str(value) for key, value in fields.items()}, left_out=left_out)


def _expanded(names: Any) -> Iterator[str]:
    """Yield names with their ranges, such as {000..123}, written out."""
    for name in names if isinstance(names, list) else ():
        match = _RANGE.search(str(name))
        if match is None:
            yield str(name)
            continue
        for number in range(int(match[1]), int(match[2]) + 1):
            yield from _expanded([f"{name[: match.start()]}{number:0{len(match[1])}d}{name[match.end() :]}"])


def _mapping(path: DataPath) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({' '.join(str(problem).split())}); prepare the data set again") from problem
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected keys and values, found {shown(found)}; prepare the data set again")
    return found


def _split_name(name: str) -> tuple[str, str]:
    """Return (key, kind): the name up to the first dot behind its folder, and the rest."""
    folder, slash, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return f"{folder}{slash}{key}", kind.lower()


def _text(raw: bytes, *, is_json: bool, where: str) -> Any:
    try:
        return json.loads(raw) if is_json else raw.decode("utf-8-sig")
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: cannot be read ({problem}); correct it, or remove the sample") from problem


def _field(parts: Mapping[str, Any], path: str, *, where: str) -> Any:
    match = _FIELD.match(path)
    if match is None or match[1] not in parts:
        raise DataError(f"{where}: no {path!r}, which field_map names; found {shown_keys(dict(parts))}")
    value = parts[match[1]]
    for step in re.findall(r"\[([^\[\]]+)\]", match[2]):
        try:
            value = value[int(step) if isinstance(value, list) else step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise DataError(f"{where}: no {path!r}, which field_map names: there is no {step!r}") from None
    return value


def _by_names(parts: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the sample of files whose names say what they are: a conversation in json, or images and their text."""
    kinds = {kind: kind.rpartition(".")[2] for kind in parts}
    media = {medium: [value for kind, value in parts.items() if _MEDIUM.get(kinds[kind]) == medium] for medium in _MEDIA}
    listed = {medium: files for medium, files in media.items() if files}
    described = parts["json"] if isinstance(parts.get("json"), dict) else {}
    if others := [kind for kind, end in kinds.items() if end not in _MEDIUM and kind not in _READ]:
        raise DataError(
            f"{where}: {shown(others[0])} is no image, sound or video, nor 'txt' or 'json', and would be lost; remove it there"
        )
    is_chat = bool({"messages", "conversations"} & described.keys())
    found = [parts.get("txt"), *([] if is_chat else map(described.get, ("caption", "text")))]
    texts = [each for each in found if isinstance(each, str)]
    if len({each.strip() for each in texts}) + is_chat > 1:
        raise DataError(
            f"{where}: has several texts, {shown(texts[0])} and another one, of which one alone would be learnt; remove the "
            "others, or name the one by Energon's field_map"
        )
    if is_chat:
        outside = {name for medium in listed for name in (medium, f"{medium}s")}  # what those were called outside
        return {**{key: value for key, value in described.items() if key not in outside}, **listed}
    if not texts or not listed:
        raise DataError(
            f"{where}: found {shown_keys(dict(parts))}; expected images, sound or a video beside a 'txt', or a 'json' with "
            "'messages', 'conversations' or 'caption'"
        )
    return _asked(listed, "", texts[0])


def _asked(listed: Mapping[str, list[Any]], question: str, answer: str) -> dict[str, Any]:
    """listed: medium -> its files."""
    content: list[Any] = [{"type": medium} for medium, files in listed.items() for _ in files]
    content += [{"type": "text", "text": question}] if question else []
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **listed}
