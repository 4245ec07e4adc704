"""Mutations of the data: an entry of it, in each of its forms, an image, and a sound."""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from scipy.io import wavfile

from tests.distributed.mutations.files import LEAVES, byte_mutations, place_mutations, places, replaced
from tests.distributed.mutations.mutation import Inputs, Mutation, short
from tests.distributed.small_run import MODEL, manifest_entries

_SOUND_HEADERS = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())["sound headers"]


def manifest_mutations() -> Iterator[Mutation]:
    entry = manifest_entries()[2]
    for path, value in places(entry):
        shown = ".".join(map(str, path))
        for leaf in LEAVES:
            if leaf != value:
                apply = partial(_write_entry, entry=replaced(entry, path, leaf))
                yield Mutation(f"manifest: {shown} = {short(leaf)}", apply, ("line 3",))
        yield Mutation(f"manifest: without {shown}", partial(_write_entry, entry=replaced(entry, path)), ("line 3",))
    for name, target in {
        "absolute": "/etc/hostname",
        "above": "../../../../etc/hostname",
        "its folder": ".",
        "a device": "/dev/zero",
    }.items():
        changed = replaced(entry, ("segments", 0, "path"), target)
        yield Mutation(f"manifest: path {name}", partial(_write_entry, entry=changed), ("line 3",), must_be_refused=True)


def _write_entry(inputs: Inputs, *, entry: Any) -> None:
    entries = manifest_entries()
    entries[2] = entry
    inputs.manifest.write_text("".join(json.dumps(each) + "\n" for each in entries))


def write_chats(folder: Path, form: str = "chats.jsonl", *, change: Callable[[Any], Any] = lambda entry: entry) -> Path:
    """Write the samples in another form, the third (of tables: every one) changed; returns the path for `--data-path`."""
    entries = [_entry_of(form, index) for index in range(4)]
    is_table = form in _TABLES
    entries = [change(entry) if is_table or index == 2 else entry for index, entry in enumerate(entries)]
    path = folder / form
    if is_table:
        _TABLES[form](path, entries)
    else:
        path.write_text(json.dumps(entries) if form.endswith("json") else "".join(json.dumps(entry) + "\n" for entry in entries))
    return path.parent if form.endswith("arrow") else path


def _entry_of(form: str, index: int) -> dict[str, Any]:
    image, answer = f"{index}.png", f"picture {index}"
    if form.endswith("json"):
        turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": answer}]
        return {"id": f"s{index}", "image": image, "conversations": turns}
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": [{"bytes": None, "path": image}] if form in _TABLES else [image]}


def _write_parquet(path: Path, entries: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(entries), path)


def _write_arrow(path: Path, entries: list[Any]) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(entries)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (path.parent / "state.json").write_text(json.dumps({"_data_files": [{"filename": path.name}]}))
    (path.parent / "manifest.jsonl").unlink()  # which comes first in a folder


_TABLES = {"rows.parquet": _write_parquet, "rows.arrow": _write_arrow}


def chat_mutations() -> Iterator[Mutation]:
    """Change a sample in LLaVA's JSON, in chats of JSON lines, and in tables; and these files' bytes."""
    forms = ("chats.jsonl", "llava.json", *(_TABLES if find_spec("pyarrow") is not None else ()))
    for form in forms:
        held = [leaf for leaf in LEAVES if form not in _TABLES or (leaf != {} and not (type(leaf) is int and leaf > 2**62))]
        for path, value in places(_entry_of(form, 2)):
            if form in _TABLES and path[0] == "messages" and len(path) > 1:
                continue  # a column of tables has one type
            shown = f"{form} {'.'.join(map(str, path))}"
            for leaf in held:
                if leaf != value:
                    apply = partial(_write_chats, form=form, change=partial(_replace, path=path, values=(leaf,)))
                    yield Mutation(f"chats: {shown} = {short(leaf)}", apply, (form.partition(".")[0],) * (form not in _TABLES))
            apply = partial(_write_chats, form=form, change=partial(_replace, path=path, values=()))
            yield Mutation(f"chats: {shown} left out", apply)
        find = partial(_write_chats, form=form)
        yield from byte_mutations(f"chats: {form}", find, _BYTES, ("data",))
        yield from place_mutations("chats", find, file=form)


def _replace(entry: Any, *, path: tuple[str | int, ...], values: tuple[Any, ...]) -> Any:
    return replaced(entry, path, *values)


def _write_chats(inputs: Inputs, *, form: str, change: Callable[[Any], Any] = lambda entry: entry) -> Path:
    inputs.flags["--data-path"] = write_chats(inputs.folder / "data", form, change=change)
    return inputs.folder / "data" / form


_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2 - 3],  # in the middle of a line
    "without its end": lambda content: content[:-9],
    "with zeros inside": lambda content: content[:16] + b"\0" * 16 + content[32:],
    "text": lambda content: b"no data at all\n",
    "nested deeply": lambda content: b"[" * 10**6,
    "an archive": lambda content: b"PK\x03\x04" + content,
    "compressed": gzip.compress,
    "a pickle": lambda content: b"cos\nabort\n(tR.",
}


def sound_mutations() -> Iterator[Mutation]:
    """Give the encoder sound in place of images, one clip of which is changed."""
    yield from byte_mutations("sound:", _give_sound, _BYTES, ("2.wav",))
    headers = {name: (place, value.to_bytes(size, "little")) for name, (place, value, size) in _SOUND_HEADERS.items()}
    changes = {name: partial(_set_bytes, place=place, value=value) for name, (place, value) in headers.items()}
    yield from byte_mutations("sound:", _give_sound, changes, ("2.wav",), must_be_refused=False)
    for dtype in ("uint8", "int32", "float32", "float64", "int64"):
        yield Mutation(f"sound: {dtype}", partial(_give_sound, dtype=dtype), ("2.wav",))
    yield Mutation("sound: no numbers", partial(_give_sound, dtype="float32", scale=math.nan), ("2.wav",), must_be_refused=True)
    yield from place_mutations("sound", _give_sound, file="2.wav")


def _set_bytes(content: bytes, *, place: int, value: bytes) -> bytes:
    return content[:place] + value + content[place + len(value) :]


def _give_sound(inputs: Inputs, *, dtype: str = "int16", scale: float = 1.0) -> Path:
    vision = {key: value for key, value in MODEL["units"]["vision"].items() if key != "image"}
    vision |= {"audio": {"num_mel_bins": 8, "max_tokens": 50}, "has_rotary_positions": False}
    inputs.give("model", {"units": MODEL["units"] | {"vision": vision}})
    folder = inputs.folder / "data"
    entries = manifest_entries()
    for index, entry in enumerate(entries):
        entry["segments"][0] = {"type": "audio", "path": f"{index}.wav"}
        noise = np.random.default_rng(index).uniform(0.4, 0.6, 4000 + 800 * index) * (scale if index == 2 else 1.0)
        largest = np.iinfo(dtype).max if np.dtype(dtype).kind in "iu" and index == 2 else 1.0 if index == 2 else 2**15 - 1
        wavfile.write(folder / f"{index}.wav", 16000, (noise * largest).astype(dtype if index == 2 else "int16"))
    inputs.manifest.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder / "2.wav"


def image_mutations() -> Iterator[Mutation]:
    find = _image_path
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda image: b"",
        "truncated": lambda image: image[: len(image) // 2],
        "text": lambda image: b"no image at all",
        "a script": lambda image: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\nshowpage\n",
        "flipped": lambda image: image[:60] + bytes([image[60] ^ 0xFF]) + image[61:],
    }
    yield from byte_mutations("image:", find, changes, ("2.png",))
    yield from place_mutations("image", find, file="2.png")
    for name, options in _IMAGE_FORMATS.items():
        yield Mutation(f"image: {name}", partial(_draw_image, mode="RGB", size=(64, 48), **options), ("2.png",))
    for mode in ("L", "P", "1", "RGBA", "I;16", "LA"):
        yield Mutation(f"image: mode {mode}", partial(_draw_image, mode=mode, size=(64, 48)), ("2.png",))
    for size in ((1, 1), (1, 5000), (12000, 12000), (64, 49)):
        yield Mutation(f"image: size {size}", partial(_draw_image, mode="L", size=size), ("2.png",), must_be_refused=True)


def _image_path(inputs: Inputs) -> Path:
    return inputs.folder / "data" / "2.png"


def _draw_image(inputs: Inputs, *, mode: str, size: tuple[int, int], **options: Any) -> None:
    Image.new(mode, size).save(_image_path(inputs), **options)


_IMAGE_FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"format": "JPEG"},
    "WebP": {"format": "WEBP"},
    "BMP": {"format": "BMP"},
    "several frames": {"format": "GIF", "save_all": True, "append_images": [Image.new("RGB", (64, 48), "red")]},
    "several pages of other sizes": {"format": "TIFF", "save_all": True, "append_images": [Image.new("RGB", (9, 9))]},
    "a format that is not read": {"format": "PPM"},
    "an icon": {"format": "ICO"},
    "a broken colour profile": {"format": "PNG", "icc_profile": b"no profile"},
    "turned by its EXIF": {"format": "JPEG", "exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"},
    "EXIF that is none": {"format": "JPEG", "exif": b"Exif\0\0II*\0\xff\xff\xff\xff"},
}
