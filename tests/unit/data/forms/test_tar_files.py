"""Tar archives of WebDataset and Energon as sources, and what can be wrong with them."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.forms.segments import ImageSegment
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph
from tests.unit.data.conftest import DataFolder

CHAT = {"conversations": [{"from": "human", "value": "<image>\n<image>\nwhat?"}, {"from": "gpt", "value": "cats"}]}


@pytest.fixture
def pictures(tmp_path: Path, data: DataFolder) -> list[bytes]:
    return [(tmp_path / data.image(f"{name}.png", size)).read_bytes() for name, size in (("a", (24, 16)), ("b", (16, 32)))]


def write_tar(path: Path, files: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else str(content).encode() if isinstance(content, str) else b""
            raw = raw or json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return path


def read(path: Path) -> list[list[Any]]:
    """The segments of all samples, images as their bytes."""
    files = open_sample_files(path)
    return [
        [files.embedded(each.path) if isinstance(each, ImageSegment) else (each.role, each.text) for each in sample.segments]
        for sample in files.samples()
    ]


def energon(folder: Path, pictures: list[bytes], **dataset: Any) -> Path:
    for number, picture in enumerate(pictures):
        described = {"asked": {"en": f"what {number}?"}, "said": ["cats", "dogs"]}
        write_tar(
            folder / "shards" / f"{number:02d}.tar",
            {"x.png": picture, "x.json": described, "y.png": picture, "y.json": described},
        )
    splits = {
        "split_parts": {"train": ["shards/{00..00}.tar"], "val": ["shards/01.tar"], "test": []},
        "exclude": ["shards/01.tar/y"],
    }
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(splits))
    (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(dataset))
    return folder


def test_samples_of_archives_are_those_of_files(tmp_path: Path, pictures: list[bytes], data: DataFolder):
    a, b = pictures
    write_tar(
        tmp_path / "shards" / "1.tar",
        {"s/000.1.png": a, "s/000.2.png": b, "s/000.json": CHAT, "s/001.PNG": b, "s/001.txt": "dogs"},
    )
    write_tar(tmp_path / "shards" / "0.tar", {"c.png": a, "c.json": {"caption": "birds"}})

    assert read(tmp_path / "shards") == [
        [a, ("assistant", "birds")],
        [a, b, ("user", "what?"), ("assistant", "cats")],
        [b, ("assistant", "dogs")],
    ]
    expected = data.open(data.entries([{**CHAT, "images": ["a.png", "b.png"]}]))
    found = data.open(tmp_path / "shards" / "1.tar")
    assert len(found) == 2
    assert found.lengths(0) == expected.lengths(0)
    for item in range(2):
        assert np.array_equal(found.item(0, item).patches, expected.item(0, item).patches)


def test_a_split_of_energon_by_its_field_map(tmp_path: Path, pictures: list[bytes]):
    fields = {"image": "png", "context": "json[asked][en]", "answers": "json[said]"}
    folder = energon(tmp_path / "set", pictures, sample_type={"__class__": "VQASample"}, field_map=fields)
    sample = [pictures[0], ("user", "what 0?"), ("assistant", "cats")]
    assert read(folder / "train") == [sample, sample]
    assert read(folder / "val") == [[pictures[1], ("user", "what 1?"), ("assistant", "cats")]], "the other one is excluded"
    with pytest.raises(DataError, match="of the splits train, val; give --data-path .*set/train or .*set/val"):
        open_sample_files(folder)
    with pytest.raises(DataError, match="of the splits train, val"):
        open_sample_files(folder / "trian")


@pytest.mark.parametrize(
    ("kind", "field_map", "message"),
    [
        ("OCRSample", {"image": "png"}, "OCRSample with the field_map .* is not read"),
        ("CaptioningSample", {"image": "png"}, "CaptioningSample with image, caption"),
        ("CaptioningSample", {"image": "jpg", "caption": "json[said]"}, "00.tar, x: no 'jpg', which field_map names"),
        ("CaptioningSample", {"image": "png", "caption": "json[told]"}, "no 'json.told.', .* names: there is no 'told'"),
    ],
)
def test_a_field_map_that_cannot_be_read(tmp_path: Path, pictures: list[bytes], kind: str, field_map: Any, message: str):
    folder = energon(tmp_path / "set", pictures, sample_type={"__class__": kind}, field_map=field_map)
    with pytest.raises(DataError, match=message):
        read(folder / "train")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"x", "a.npy": b"x", "a.txt": "t"}, "data.tar, a: 'npy' is no image, sound, video or text"),
        ({"a.png": b"x"}, "data.tar, a: found 'png'; expected images, sound or a video beside"),
        ({"a.png": b"x", "a.json": b"{"}, "data.tar, a.json: cannot be read"),
        ({"a.png": b"x", "a.json": {"messages": []}}, "data.tar, a: 'messages' is empty"),
    ],
)
def test_a_wrong_sample_is_named(tmp_path: Path, files: dict[str, Any], message: str):
    path = write_tar(tmp_path / "data.tar", files)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_damaged_archive_and_a_link(tmp_path: Path):
    path = write_tar(tmp_path / "data.tar", {"a.png": b"x" * 2000, "a.txt": "t"})
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DataError, match="ends inside a.png; copy the archive again"):
        read(path)
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="a.png is a link, not a file"):
        read(path)


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_sound_in_an_archive_is_that_of_a_file(tmp_path: Path, data: DataFolder, two_encoder_graph: ModelGraph, kind: str):
    clip = data.audio("a.wav", 4000, rate=8000)
    if kind == "flac":
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(tmp_path / "a.flac", *soundfile.read(tmp_path / clip))
    raw = (tmp_path / f"a.{kind}").read_bytes()
    archive = write_tar(tmp_path / "shards" / "0.tar", {f"a.{kind}": raw, "a.txt": "cats", f"b.{kind}": raw[:20], "b.txt": "no"})
    turns = [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "cats"}]
    expected = data.open(data.entries([{"messages": turns, "audios": [f"a.{kind}"]}]), graph=two_encoder_graph)
    found = data.open(archive, graph=two_encoder_graph, skips_bad=True)
    assert found.lengths(0) == expected.lengths(0)
    assert np.array_equal(found.item(0, 0).patches, expected.item(0, 0).patches)
    with pytest.raises(DataError, match="0.tar, b: its sound cannot be decoded as sound"):
        data.open(archive, graph=two_encoder_graph)
