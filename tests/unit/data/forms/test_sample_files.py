"""LLaVA's JSON, chats in JSON lines and data sets of Hugging Face as sources, and everything that can be wrong with them."""

import io
import json
import pickle
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from multimodal.data.forms.sample_files import SampleFiles, open_sample_files
from multimodal.data.forms.segments import FileSegment
from multimodal.data.forms.tar_files import _Header
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph
from tests.sanity.repository import ROOT
from tests.unit.data.conftest import DataFolder, assert_same

ASSISTANT = {"role": "assistant", "content": "cats"}


def shown(image: str) -> dict[str, Any]:
    asked, said = {"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "cats"}
    return {"image": image, "conversations": [asked, said]}


def asked(content: Any, **beside: Any) -> dict[str, Any]:
    return {**beside, "messages": [{"role": "user", "content": content}, ASSISTANT]}


def spoken(segments: tuple[Any, ...]) -> list[list[str] | str]:
    return [segment.path if isinstance(segment, FileSegment) else [segment.role, segment.text] for segment in segments]


CHATS = [json.loads(line) for line in (ROOT / "tests" / "golden" / "chats.txt").read_text().splitlines()]
"""Samples, each before the paths and the turns that are read of it."""


@pytest.mark.parametrize(("entry", "expected"), zip(CHATS[::2], CHATS[1::2], strict=True), ids=map(str, range(len(CHATS) // 2)))
def test_chats_become_segments(data: DataFolder, entry: dict[str, Any], expected: list[Any]) -> None:
    for name, lines in (("data.jsonl", [1, 2]), ("data.json", [2, 1 + json.dumps([entry], indent=1).count("\n")])):
        path = data.entries([entry, entry], name)
        found = list(open_sample_files(path).samples())
        assert [spoken(sample.segments) for sample in found] == [expected] * 2
        assert [sample.where.split(" (")[0] for sample in found] == [f"{path}, line {line}" for line in lines]


TURNS = ("user", "what?"), ("assistant", "cats")
SEGMENTS = [{"type": "text", "role": role, "text": text} for role, text in TURNS]
PAIR = {"user": "what?", "assistant": "cats"}
ROWS: dict[str, Callable[[str], dict[str, Any]]] = {
    "manifest.jsonl": lambda name: {"id": name, "segments": [{"type": "image", "path": name}, *SEGMENTS]},
    "llava.json": shown,
    "llava.jsonl": shown,
    "parts.jsonl": lambda name: asked([{"type": "image", "path": name}, {"type": "text", "text": "what?"}]),
    "marks.json": lambda name: asked("<image>what?", images=[name]),
    "swift.jsonl": lambda name: {"query": "<image>what?", "response": "cats", "images": [name]},
    "alpaca.json": lambda name: {"instruction": "<image>what?", "input": "", "output": "cats", "images": [name]},
    "finevision.jsonl": lambda name: {"texts": [PAIR], "images": [name]},
}
"""A file's name -> a question about an image in its form."""
FORMS = (*ROWS, "rows.parquet", "shards/0.tar", "shards/train")


def write_form(folder: Path, form: str, names: Sequence[str]) -> Path:
    """Write the questions about images in one of FORMS beside these; returns its --data-path."""
    path, rows = folder / form, [ROWS.get(form, ROWS["marks.json"])(name) for name in names]
    if form in ROWS:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) if form.endswith("l") else json.dumps(rows, indent=1))
    elif form == "rows.parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'braid[hf]')")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        files = {name: (folder / name).read_bytes() for name in names}
        files |= {f"{Path(name).stem}.json": row for name, row in zip(names, rows, strict=True)}
        write_tar(folder / "shards" / "0.tar", {name: files[name] for name in sorted(files)})
        (folder / "shards" / ".nv-meta").mkdir(exist_ok=True)
        (folder / "shards" / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": ["0.tar"]}}))
    return path


def test_one_corpus_in_every_form_is_one(data: DataFolder) -> None:
    """Tokens, targets and pixels, and so the losses, are the same; without a chat template: turns of Braid's own."""
    names = [data.image("a.png", (24, 16)), data.image("b.png", (16, 32))]
    first, *others = (data.open(write_form(data.path, form, names)) for form in FORMS)
    assert len(first) == 2
    for source in others:
        assert_same(source, first)


def test_folders_of_another_form_say_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(DataError, match=r"manifest\.jsonl: no such manifest; give .*save_to_disk.* there is notes\.txt"):
        open_sample_files(tmp_path)
    for split in ("train", "test"):
        (tmp_path / "set" / split).mkdir(parents=True)
        (tmp_path / "set" / split / "state.json").write_text("{}")
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match=r"a data set of several splits; give --data-path one of them: .*set/test or .*set/train"):
        open_sample_files(tmp_path / "set")
    with pytest.raises(DataError, match=r"state\.json: is not as save_to_disk writes it"):
        open_sample_files(tmp_path / "set" / "train")
    for name in ("../secret.arrow", "gone.arrow"):
        (tmp_path / "set" / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match=r"names .*arrow, which is not beside it"):
            open_sample_files(tmp_path / "set" / "train")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for ending in ("-00000-of-00001", "-0", ""):
        for split in ("train", "test"):
            (tmp_path / "hub" / "data" / f"{split}{ending}.parquet").write_text("PAR1")
        with pytest.raises(DataError, match=r"several splits; .*a folder of the test\*.parquet alone or"):
            open_sample_files(tmp_path / "hub")
        for file in (tmp_path / "hub" / "data").iterdir():
            file.unlink()


@pytest.fixture(params=["arrow", "parquet"])
def data_set(request: pytest.FixtureRequest, tmp_path: Path, data: DataFolder) -> Path:
    """A folder as save_to_disk writes it, or one of Parquet files; two files of small batches each."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'braid[hf]')")
    data.image("a.png", (24, 16))
    image = (tmp_path / data.image("b.png", (8, 40), seed=1)).read_bytes()
    shown = ([{"bytes": image, "path": "x.png"}], [{"bytes": None, "path": "a.png"}], [], [{"bytes": image, "path": None}])
    table = pyarrow.Table.from_pylist([asked("<image>what?" if images else "what?", images=images) for images in shown])
    if request.param == "parquet":
        import pyarrow.parquet

        (tmp_path / "data").mkdir()
        for index in range(2):
            name = f"data/train-0000{index}-of-00002.parquet"
            pyarrow.parquet.write_table(table.slice(2 * index, 2), tmp_path / name, row_group_size=1)
        (tmp_path / "data" / "a.png").write_bytes((tmp_path / "a.png").read_bytes())
        return tmp_path / "data"
    names = [f"data-0000{index}-of-00002.arrow" for index in range(2)]
    for index, name in enumerate(names):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(2 * index, 2), max_chunksize=1)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return tmp_path


def test_data_sets_of_hugging_face(data_set: Path, data: DataFolder) -> None:
    source = data.open(data_set)
    assert [len(source.lengths(index).items) for index in range(len(source))] == [1, 1, 0, 1]
    copy = pickle.loads(pickle.dumps(source))
    for index, grid in ((3, (10, 2)), (0, (10, 2)), (1, (4, 6))):
        assert source.item_grid(index, 0) == grid
        np.testing.assert_array_equal(copy.item(index, 0).patches, source.item(index, 0).patches)
        assert len(source.item(index, 0).patches) == grid[0] * grid[1]


def test_a_text_in_a_row_is_no_address_of_another_row(data: DataFolder) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'braid[hf]')")
    parquet, path = pytest.importorskip("pyarrow.parquet"), data.path / "data.parquet"
    rows = {"no file can be called": asked("<image>what?", images=['\0[0, "images", 0]'])}
    for message, row in (rows | {"has bytes where a text belongs": {"text": b"once"}}).items():
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        with pytest.raises(DataError, match=f"data.parquet, row 0: {message}"):
            data.open(path)


def test_damaged_data_sets_are_named(data_set: Path, data: DataFolder) -> None:
    (file,) = (path for path in (*data_set.glob("*-00001-of-00002.*"),))
    before = open_sample_files(data_set).digest
    content = bytearray(file.read_bytes())
    content[20:40] = bytes(20)
    file.write_bytes(content[: len(content) // 2])
    assert open_sample_files(data_set).digest != before
    with pytest.raises(DataError, match=f"{file.name}: cannot be read"):
        data.open(data_set)


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


def content(files: SampleFiles, segment: Any) -> Any:
    return (
        files.open_item(segment.path, where="here").read() if isinstance(segment, FileSegment) else (segment.role, segment.text)
    )


def read(path: Path) -> list[list[Any]]:
    """The segments of all samples, images as their bytes."""
    files = open_sample_files(path)
    return [[content(files, each) for each in sample.segments] for sample in files.samples()]


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
    (folder / ".nv-meta" / "dataset.yaml").write_text("sample_loader: sample_loader.py:load")
    with pytest.raises(DataError, match="'sample_loader.py:load' is a program, and nothing in data is run"):
        open_sample_files(folder / "val")


def test_a_damaged_archive_and_a_link(tmp_path: Path):
    path = write_tar(tmp_path / "data.tar", {"a.png": b"x" * 2000, "a.txt": "t"})
    whole = path.read_bytes()
    for content, message in (
        (whole[:1500], "ends inside a.png; copy the archive again"),
        (whole[:3584], "ends without the mark of its end behind byte 3,584"),
        (whole[:3584] + b"x" * 512, "has other bytes, or another archive, behind byte 3,584"),
        (whole + whole, "has other bytes, or another archive, behind byte 3,584"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(path)
    path.write_bytes(whole)
    files = open_sample_files(path)
    (sample,) = files.samples()
    path.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="line 3: .*data.tar does not exist; restore the file"):
        files.open_item(sample.segments[0].path, where="line 3")
    (tmp_path / "moved").rename(path)
    (tmp_path / "gone.tar").symlink_to("nowhere")
    with pytest.raises(DataError, match="cannot be read .*gone.tar.*; copy the data again"):
        open_sample_files(tmp_path).digest  # noqa: B018
    (tmp_path / "more.tar.gz").touch()
    with pytest.raises(DataError, match="more.tar.gz: would be left out, as it is compressed"):
        open_sample_files(tmp_path)
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="a.png is a link, not a file"):
        read(path)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_are_read_as_tarfile_reads_them(form: int) -> None:
    deep = "folder/" * 20
    names = ["a.png", "ä.png", "f" * 100, f"{deep}a.png"] + ["g" * 200] * (form != tarfile.USTAR_FORMAT)
    members = [tarfile.TarInfo(name) for name in (*names, "empty")] + [tarfile.TarInfo("folder")]
    members[-1].type = tarfile.DIRTYPE
    raw = b""
    for size, member in enumerate(members[:-1]):
        member.size = 300 * size
        raw += member.tobuf(form) + bytes(member.size + -member.size % 512)
    raw += members[-1].tobuf(form)
    found = []
    for kind in (tarfile.TarInfo, _Header):
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", tarinfo=kind) as archive:
            found.append([(each.name, each.size, each.offset_data, each.isfile(), each.isdir()) for each in archive])
    assert found[0] == found[1] and len(found[0]) == len(members)
    header = members[0].tobuf(form)[-512:]
    for place in range(0, 512, 7):
        damaged = bytearray(header)
        damaged[place] ^= 1
        messages = []
        for kind in (tarfile.TarInfo, _Header):
            with pytest.raises(tarfile.HeaderError) as problem:
                kind.frombuf(bytes(damaged), "utf-8", "surrogateescape")
            messages.append(str(problem.value))
        assert messages[0] == messages[1]


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


def test_the_page_shows_one_sample_in_each_form(data: DataFolder) -> None:
    """Each file of docs/data.md is read as it stands there."""
    data.image("a.png", (24, 16))
    page = (ROOT / "docs" / "data.md").read_text().partition("### One sample in each form")[2].partition("### A mixture")[0]
    files = re.findall(r"^`(\S+\.jsonl?)`\n\n    (.+)$", page, re.MULTILINE)
    assert len(files) == 7
    for name, text in files:
        (data.path / name).write_text(text)
        found = spoken(*(sample.segments for sample in open_sample_files(data.path / name).samples()))
        assert found == ["a.png", ["user", "What?"], ["assistant", "Cats."]], name
