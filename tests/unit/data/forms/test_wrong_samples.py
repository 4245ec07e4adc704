"""Everything that can be wrong with a sample, a list or a file, in whatever form, and what is no text."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from multimodal.data.chat.chat_template import ChatTemplate
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph
from tests.unit.data.chat.templates import CHATML
from tests.unit.data.conftest import UNITS, DataFolder
from tests.unit.data.forms.test_sample_files import energon, read, write_tar
from tests.unit.golden_answers import Kinds, golden_test

ANSWER = {"type": "text", "role": "assistant", "text": "yes"}
GOOD = {"id": "s1", "segments": [ANSWER]}


def read_line(line: str) -> None:
    """Open a good sample and a line; what a line in JSON is refused for, it is also in a list, where it begins."""
    Image.new("RGB", (8, 8)).save("a.png")
    Path("text.png").write_text("no image")
    data = DataFolder(Path(), ModelGraph.from_dict({"units": UNITS}))
    data.open(data.manifest([json.dumps(GOOD), line]))


def read_text(text: str) -> None:
    Path("data.json").write_text(text)
    DataFolder(Path(), ModelGraph.from_dict({"units": UNITS})).open(Path("data.json"))


def read_split(kind: str, field_map: dict[str, str]) -> None:
    shutil.rmtree("set", ignore_errors=True)
    read(energon(Path("set"), [b"a picture"], sample_type={"__class__": kind}, field_map=field_map) / "train")


CAPTIONED = {"kind": "CaptioningSample", "field_map": {"image": "png", "caption": "json[said]"}}
SAMPLES: Kinds = {
    "sample": ({"sample": {"id": "x", "segments": [ANSWER]}}, lambda document: read_line(json.dumps(document["sample"]))),
    "line": ({"line": json.dumps({"id": "x", "segments": [ANSWER]})}, lambda document: read_line(document["line"])),
    "archive": ({"files": {"a.png": "a picture", "a.txt": "t"}}, lambda document: read(write_tar(Path("data.tar"), **document))),
    "sample of Energon": (CAPTIONED, lambda document: read_split(**document)),
    "chat template": ({"text": CHATML}, lambda document: ChatTemplate(document["text"], "some.jinja").render_example()),
    "data.json": ({"text": json.dumps([GOOD])}, lambda document: read_text(document["text"])),
}
test_every_sample_is_answered_as_written = golden_test("samples.txt", SAMPLES)
NO_OBJECT = "not a complete JSON object"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff", NO_OBJECT),
        (b'{"id": "x", "segments": [{"type": "text", "role": "user", "text": "caf\xe9"}]}', f"{NO_OBJECT} .*utf-8"),
        (b"[" * 100_000, f"{NO_OBJECT} .*recursion"),
        ('{"id": "x", "segments": ' + "[" * 5000 + "]" * 5000 + "}", f"{NO_OBJECT}|expected a JSON object with a"),
        (b'{"id": 1' + b"0" * 5000 + b', "segments": []}', f"{NO_OBJECT} .*4300 digits"),
    ],
)
def test_a_line_that_is_no_text_or_has_no_end_is_named(data: DataFolder, line: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"manifest.jsonl, line 2.*{message}") as caught:
        data.open([json.dumps(GOOD), line])
    assert "\n" not in str(caught.value)


def test_in_a_list_a_sample_has_the_line_where_it_begins(data: DataFolder) -> None:
    wrong: dict[str, Any] = {"id": "x", "segments": []}
    (data.path / "data.json").write_text(json.dumps([GOOD, wrong], indent=1))
    with pytest.raises(DataError, match=f"data.json, line {3 + json.dumps([GOOD], indent=1).count(chr(10)) - 2}.*'segments' is"):
        data.open(data.path / "data.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "data.json: is a zip archive; unpack it, and give --data-path a manifest.jsonl, JSON lines"),
        (gzip.compress(b"{}", mtime=0), r"data.json, line 1: the manifest is compressed, expected JSON; unpack it first"),
    ],
)
def test_archives_are_named(data: DataFolder, content: bytes, message: str) -> None:
    (data.path / "data.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.open(data.path / "data.json")


def test_missing_and_empty_manifests(data: DataFolder) -> None:
    (data.path / "folder" / "manifest.jsonl").mkdir(parents=True)
    for wrong in ("gone.jsonl", "folder", "folder/manifest.jsonl"):
        with pytest.raises(DataError, match=rf"{Path(wrong).stem}.*\.jsonl: no such manifest; give --data-path"):
            data.open(data.path / wrong)
    with pytest.raises(DataError, match=r"manifest\.jsonl: the manifest is empty"):
        data.open([])
    clip = {"type": "audio", "path": "a.wav", "seconds": 1.0}
    with pytest.raises(DataError, match=r"no usable sample \(2 samples with audio"):
        data.open([[clip, ANSWER]] * 2)
