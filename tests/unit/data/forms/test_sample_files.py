"""LLaVA's JSON, chats in JSON lines and data sets of Hugging Face as sources, and everything that can be wrong with them."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.forms.segments import AudioSegment, ImageSegment
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph

ASK = {"from": "human", "value": "<image>\nwhat?"}
SAY = {"from": "gpt", "value": "cats"}
USER, ASSISTANT = {"role": "user", "content": "what?"}, {"role": "assistant", "content": "cats"}
IMAGE = ImageSegment("a.png")


@pytest.fixture
def write(tmp_path: Path, write_image: Callable[..., str]) -> Callable[..., Path]:
    """Write data into a file, beside an image a.png; a list in JSON, or its entries one a line."""
    write_image("a.png", (24, 16))

    def build(entries: list[Any], name: str = "data.jsonl") -> Path:
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (tmp_path / name).write_text(lines if name.endswith("l") else json.dumps(entries, indent=1))
        return tmp_path / name

    return build


def spoken(segments: tuple[Any, ...]) -> list[tuple[str, str] | str]:
    return [
        segment.path if isinstance(segment, (ImageSegment, AudioSegment)) else (segment.role, segment.text)
        for segment in segments
    ]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"image": "a.png", "conversations": [ASK, SAY]}, ["a.png", ("user", "what?"), ("assistant", "cats")]),
        (
            {
                "image": ["a.png", "b.png"],
                "conversations": [{"from": "human", "value": "<image>\n<image>\nor <image>"}, SAY],
                "images": "c",
            },
            ["a.png", "b.png", ("user", "or "), "c", ("assistant", "cats")],
        ),
        (
            {
                "image": "a.png",
                "conversations": [{"from": "human", "value": "what?\n<image>"}, SAY, {"from": "human", "value": "why?"}, SAY],
            },
            [("user", "what?"), "a.png", ("assistant", "cats"), ("user", "why?"), ("assistant", "cats")],
        ),
        (
            {"id": 3, "conversations": [{"from": "system", "value": "be"}, {"from": "human", "value": ""}, SAY]},
            [("system", "be"), ("user", ""), ("assistant", "cats")],
        ),
        (
            {"id": 1, "instruction": "a", "input": "what?", "output": "cats"},
            [("user", "a\nwhat?"), ("assistant", "cats")],
        ),
        (
            {"query": "<image>why?", "response": "so", "images": ["a.png"], "history": [["what?", "cats"]], "system": "be"},
            [("system", "be"), ("user", "what?"), ("assistant", "cats"), "a.png", ("user", "why?"), ("assistant", "so")],
        ),
        (
            {"texts": [{"user": "what?", "assistant": "cats"}] * 2, "images": ["a.png", "b.png"], "relevance_ratings": [5, 4]},
            ["a.png", "b.png", *[("user", "what?"), ("assistant", "cats")] * 2],
        ),
        ({"text": "once", "url": "u"}, [("document", "once")]),
        ({"messages": [USER, ASSISTANT, USER]}, [("user", "what?"), ("assistant", "cats"), ("user", "what?")]),
        (
            {
                "messages": [{"role": "user", "content": "<audio>\nand <image>\nwhat?"}, {**ASSISTANT, "id": 7}],
                "images": ["a.png"],
                "audios": ["b.wav"],
                "videos": [],
                "source": "x",
                "metadata": {"videos": 1},
                "_own": "y",
            },
            ["b.wav", ("user", "and "), "a.png", ("user", "\nwhat?"), ("assistant", "cats")],
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "image": "file://a.png", "text": None},
                            {"type": "text", "text": "<image>"},
                            {"type": "image"},
                            {"type": "image_url", "image_url": {"url": "b.png"}},
                            {"type": "audio", "audio": "c.wav"},
                        ],
                    },
                    ASSISTANT,
                ],
                "images": ["d.png"],
                "conversations": None,
            },
            ["a.png", ("user", "<image>"), "d.png", "b.png", "c.wav", ("assistant", "cats")],
        ),
        (  # LLaMA-Factory's system; a prompt that is said again; MiniCPM-V's turns; weights that say what is learnt anyway
            {
                "system": "be",
                "prompt": "<image>\nwhat?",
                "image": {"path": "a.png", "bytes": None},
                "conversations": [{"role": "user", "content": "<image>\nwhat?", "weight": 0.0}, {**ASSISTANT, "loss": True}],
                "pair_id": "x",
            },
            [("system", "be"), "a.png", ("user", "what?"), ("assistant", "cats")],
        ),
        ({"messages": [{"from": "human", "value": "what?"}, SAY]}, [("user", "what?"), ("assistant", "cats")]),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "image", "index": 0, "text": None}]}, ASSISTANT],
                "images": ["a"],
            },
            ["a", ("assistant", "cats")],
        ),
        *[  # marks that are letters
            (
                {"messages": [{**USER, "content": question}, {**ASSISTANT, "content": answer}]},
                [("user", question), ("assistant", answer)],
            )
            for question, answer in (
                ("what is `<audio>`, or '<image>'?", "a `<image>` in SVG"),
                ("a page?", "<body><video>\n</video><img><audio></audio>"),
            )
        ],
    ],
)
def test_chats_become_segments(write: Callable[..., Path], entry: dict[str, Any], expected: list[Any]) -> None:
    for name in ("data.jsonl", "data.json"):
        found = list(open_sample_files(write([entry, entry], name)).samples())
        assert [spoken(sample.segments) for sample in found] == [expected] * 2
        lines = [1, 2] if name == "data.jsonl" else [2, 2 + (json.dumps([entry], indent=1).count("\n") - 1)]
        assert [sample.where.split(" (")[0] for sample in found] == [
            f"{write([entry, entry], name)}, line {line}" for line in lines
        ]


def test_sources_of_every_form_are_alike(write: Callable[..., Path], graph: ModelGraph) -> None:
    """Without a chat template: turns of Braid's own."""
    image, text = {"type": "image", "path": "a.png"}, {"type": "text", "role": "user", "text": "what?"}
    answer = {"type": "text", "role": "assistant", "text": "cats"}
    paths = [
        write([{"id": 1, "segments": [image, text, answer]}], "manifest.jsonl"),
        write([{"image": "a.png", "conversations": [ASK, SAY]}], "llava.json"),
        write([{"image": "a.png", "conversations": [ASK, SAY]}], "llava.jsonl"),
        write([{"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}, ASSISTANT]}]),
    ]
    sources = [ManifestSource(path, graph=graph, tokenizer=ByteTokenizer(), seq_length=99) for path in paths]
    for source in sources[1:]:
        assert source.lengths(0) == sources[0].lengths(0)
        assert source.text(0).token_ids.tolist() == sources[0].text(0).token_ids.tolist()
        np.testing.assert_array_equal(source.item(0, 0).patches, sources[0].item(0, 0).patches)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"image": "a.png", "conversations": []}, "'conversations' is empty; give the sample a question"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": {}}, "'messages' must be a list, found dict"),
        (
            {"image": "a.png", "conversations": [{"from": "human", "value": "what?"}, SAY]},
            "1 images are listed, but .* for 0 alone",
        ),
        ({"conversations": [ASK, SAY]}, r"conversations\[0\]: a place for an image .*lists no more of them"),
        ({"image": "gone.png", "conversations": [ASK, SAY]}, "gone.png does not exist; restore the file"),
        ({"image": "../a.png", "conversations": [ASK, SAY]}, r"\.\./a.png does not exist|is not in the manifest's folder"),
        ({"image": "text.png", "conversations": [ASK, SAY]}, "text.png cannot be decoded as an image"),
        ({"image": 7, "conversations": [ASK, SAY]}, "an image must be the path of a file, found 7"),
        ({"image": "http://a/b.png", "conversations": [ASK, SAY]}, "is no path of a file, and nothing is downloaded"),
        ({"image": "", "conversations": [ASK, SAY]}, "no file can be called ''"),
        ({"image": '\0[0, "image"]', "conversations": [ASK, SAY]}, r"no file can be called '\\x00\[0, \"image\"\]'"),
        (
            {"image": "a.png", "conversations": [SAY, ASK]},
            "out of order: a message of the assistant comes first, .*system or the user",
        ),
        ({"messages": [USER, USER]}, r"messages\[1\]: roles out of order: a message of the user follows the user's, .*assistant"),
        ({"messages": [USER, {"role": "system", "content": "a"}]}, r"messages\[1\]: roles out of order"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "unknown role 'tool'; use one of system, user"),
        ({"messages": [USER]}, "the assistant never answers"),
        ({"messages": ["a"]}, r"messages\[0\]: expected an object with 'role' and 'content', found str"),
        ({"messages": [{"role": "user"}]}, "the key 'content' is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "'content' must be text or a list, found int"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"content\[0\]: expected an object with a 'type', found str"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, r"content\[0\]: unknown type 'video'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            r"content\[0\]: a place for an audio .*'audios'\); list it",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "audio": {"array": [0]}}]}]},
            "no path of a file in 'type', ",
        ),
        (
            {"audios": ["a.wav", "b.wav"], "messages": [{"role": "user", "content": "<audio>what?"}, ASSISTANT]},
            "2 audios .* for 1",
        ),
        ({"videos": ["a.mp4"], "messages": [USER, ASSISTANT]}, "unknown key 'videos', .*; videos are not supported: give their"),
        (
            {"system": "a", "messages": [{"role": "system", "content": "b"}, USER, ASSISTANT]},
            r"messages\[0\]: roles out of order",
        ),
        ({"prompt": "another", "messages": [USER, ASSISTANT]}, "unknown key 'prompt'"),
        ({"messages": [{**USER, "weight": 1}, ASSISTANT]}, r"messages\[0\]: unknown key 'weight'"),
        (
            {
                "images": ["a.png", "a.png"],
                "messages": [{"role": "user", "content": [{"type": "image", "index": number} for number in (1, 0)]}, ASSISTANT],
            },
            r"content\[0\]: 'index' is 1, but this is place 0 for an image; list the files in the order",
        ),
        ({"images": [{"path": "a.png", "url": "b"}], "messages": [USER, ASSISTANT]}, "must be the path of a file, found {'path'"),
        *[
            ({"messages": [{"role": "user", "content": f"{mark}what?"}, ASSISTANT]}, re.escape(f"unknown mark {mark}"))
            for mark in ("<start_of_image>", "<IMG_CONTEXT>", "<|image_pad|>", "<img>", "<|AUDIO|>")
        ],
        ({"messages": [USER, {**ASSISTANT, "content": "<image>"}]}, r"messages\[1\]: a place for an image"),
        ({"tools": "[]", "messages": [USER, ASSISTANT]}, "unknown key 'tools', .*; remove it, or put it under 'metadata'"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, r"messages\[1\]: unknown key 'weight'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": "a.png"}]}]}, "unknown key 'image'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a", "path": "b"}]}]},
            "unknown key '.*name one file",
        ),
        (
            {"messages": [{"role": "user", "content": "<video>what?"}, ASSISTANT]},
            r"messages\[0\]: unknown mark <video>, .*a part",
        ),
        ({"messages": [{"role": "user", "content": "<image_1> what?"}, ASSISTANT]}, "unknown mark <image_1>"),
        (
            {"id": 1, "segments": [{"type": "text", "role": "document", "text": "a", "path": "a.png"}]},
            "segment 0: unknown key 'path'",
        ),
        ({"id": 1, "images": ["a.png"], "segments": [{"type": "text", "role": "document", "text": "a"}]}, "unknown key 'images'"),
        ({"query": "a", "response": "b", "history": ["c"]}, "'history' must be a list of pairs"),
        ({"texts": [{"user": "a"}]}, "'texts' must be a list of pairs of 'user' and 'assistant'"),
        ({"texts": []}, "'messages' is empty"),
        ({"text": "a", "image": "a.png"}, "unknown key 'image'"),
        (
            {"question": "a"},
            "the key 'id' is missing; found 'question'; expected 'id' and 'segments' .*'messages' .*'conversations'",
        ),
        ("text", "expected a JSON object, found str"),
    ],
)
def test_a_wrong_sample_is_named(write: Callable[..., Path], tmp_path: Path, graph: ModelGraph, entry: Any, message: str) -> None:
    (tmp_path / "text.png").write_text("no image")
    for name, line in (("data.jsonl", 2), ("data.json", 6)):
        path = write([{"messages": []}, entry], name)
        path.write_text(
            path.read_text().replace('"messages": []', '"messages": [' + json.dumps(USER) + "," + json.dumps(ASSISTANT) + "]", 1)
        )
        line = 1 + path.read_text().count("\n", 0, path.read_text().index("\n", 3)) if name == "data.jsonl" else line
        with pytest.raises(DataError, match=f"{name}, line .*{message}"):
            ManifestSource(path, graph=graph, tokenizer=ByteTokenizer(), seq_length=99)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"messages": []', "data.json, line 2: not a complete JSON value .*; the list is cut off or damaged: restore it"),
        ('[\n\n3, {"a', "data.json, line 3: expected a JSON object, found int"),
        ('[\n{"a": \n', "data.json, line 2: not a complete JSON value .*; the list is cut off or damaged: restore it"),
        (
            '[\n{"id": 1, "segments": [{"type": "text", "role": "document", "text": "a"}]}',
            "line 2: behind this entry of the list",
        ),
        ("[]", "the manifest is empty"),
        ('[\n]\n[{"a": 1}]', r"data.json, line 3: '\[{\"a\": 1}\]' follows the list; join lists into one, or remove it"),
        ('[{"id": 1, "segments": [{"type": "text", "role": "document", "text": "a"}]}] ]', "line 1: ']' follows the list"),
        ("question,answer\na,b\n", "data.json, line 1: is no JSON: it begins with 'question,answer'; give"),
        ('{"messages": [', "data.json, line 1: not a complete JSON object"),
        ("PK\x03\x04", "data.json: is a zip archive; unpack it, and give --data-path a manifest.jsonl, JSON lines"),
    ],
)
def test_files_that_are_cut_off_or_of_another_form(tmp_path: Path, graph: ModelGraph, text: str, message: str) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(DataError, match=message):
        ManifestSource(tmp_path / "data.json", graph=graph, tokenizer=ByteTokenizer(), seq_length=99)


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


def rows(image: bytes) -> list[dict[str, Any]]:
    """Two rows with images in the row, and one with a path, as `datasets` stores Image columns."""
    ask = [{"role": "user", "content": "<image>what?"}, ASSISTANT]
    return [
        {"messages": ask, "images": [{"bytes": image, "path": "x.png"}]},
        {"messages": ask, "images": [{"bytes": None, "path": "a.png"}]},
        {"messages": [USER, ASSISTANT], "images": []},
        {"messages": ask, "images": [{"bytes": image, "path": None}]},
    ]


@pytest.fixture(params=["arrow", "parquet"])
def data_set(request: pytest.FixtureRequest, write: Callable[..., Path], tmp_path: Path, write_image: Callable[..., str]) -> Path:
    """A folder as save_to_disk writes it, or one of Parquet files; two files of small batches each."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'braid[hf]')")
    write([])
    table = pyarrow.Table.from_pylist(rows((tmp_path / write_image("b.png", (8, 40), seed=1)).read_bytes()))
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
    (tmp_path / "data.jsonl").unlink()
    return tmp_path


def test_data_sets_of_hugging_face(data_set: Path, graph: ModelGraph) -> None:
    source = ManifestSource(data_set, graph=graph, tokenizer=ByteTokenizer(), seq_length=99)
    assert [len(source.lengths(index).items) for index in range(len(source))] == [1, 1, 0, 1]
    copy = pickle.loads(pickle.dumps(source))
    for index, grid in ((3, (10, 2)), (0, (10, 2)), (1, (4, 6))):
        assert source.item_grid(index, 0) == grid
        np.testing.assert_array_equal(copy.item(index, 0).patches, source.item(index, 0).patches)
        assert len(source.item(index, 0).patches) == grid[0] * grid[1]


def test_a_text_in_a_row_is_no_address_of_another_row(tmp_path: Path, graph: ModelGraph) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'braid[hf]')")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {"messages": [{**USER, "content": "<image>what?"}, ASSISTANT], "images": ['\0[0, "images", 0]']}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet, row 0: no file can be called"):
        ManifestSource(tmp_path / "data.parquet", graph=graph, tokenizer=ByteTokenizer(), seq_length=99)


def test_damaged_data_sets_are_named(data_set: Path, graph: ModelGraph) -> None:
    (file,) = (path for path in (*data_set.glob("*-00001-of-00002.*"),))
    before = open_sample_files(data_set).digest
    content = bytearray(file.read_bytes())
    content[20:40] = bytes(20)
    file.write_bytes(content[: len(content) // 2])
    assert open_sample_files(data_set).digest != before
    with pytest.raises(DataError, match=f"{file.name}: cannot be read"):
        ManifestSource(data_set, graph=graph, tokenizer=ByteTokenizer(), seq_length=99)
