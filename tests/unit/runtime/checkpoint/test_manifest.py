"""`braid.json` and `tensors.json`: what was written comes back; anything else is an error that names file and way out."""

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.runtime.checkpoint.manifest import Manifest, check_model, read_newest, write_manifest
from megatron.runtime.checkpoint.storage import INDEX_NAME, SavedPiece, SavedTensor, TensorIndex, index_to_json, read_index
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from tests.unit.golden_answers import Kinds, changed, golden_test

STATES = {"run_state": {"seed": 1, "lr": 0.1, "path": "\udc80ü"}, "schedulers_state": {"num_steps": 7}}
STATES |= {"random_state": {"python": [3, [1], None]}}
CONTENT = {"files": {"rank_00000.bin": 3}, "index_crc32": 5}
MANIFEST = Manifest(step=7, dtype="float32", model={"units": {}}, plan={}, **STATES, **CONTENT)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of step 7 with one file, and one of step 6 before it."""
    (tmp_path / "step_00000006").mkdir()
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    (folder / "rank_00000.bin").write_bytes(b"abc")
    write_manifest(folder, MANIFEST)
    return folder


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as problem:
        read_newest(folder)
    return str(problem.value)


def test_what_was_written_comes_back(checkpoint: Path) -> None:
    assert read_newest(checkpoint.parent) == (checkpoint, MANIFEST)


def test_its_layout_may_change(checkpoint: Path) -> None:
    file = checkpoint / "braid.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2, sort_keys=True))
    assert read_newest(checkpoint)[1] == MANIFEST


def test_a_manifest_that_is_nested_deeply_is_refused(checkpoint: Path) -> None:
    (checkpoint / "braid.json").write_bytes(b'{"format_version": 2, "model": ' + b"[" * 900 + b"]" * 900 + b"}")
    message = error_of(checkpoint.parent)
    assert message.startswith(f"{checkpoint} is damaged: braid.json cannot be used (") and len(message) < 1000


def test_every_cut_and_every_changed_byte_is_noticed(checkpoint: Path) -> None:
    file = checkpoint / "braid.json"
    content = file.read_bytes()
    for position in range(len(content)):
        file.write_bytes(content[:position])
        assert "braid.json cannot be used" in error_of(checkpoint)
        if not chr(content[position]).isspace():
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert str(checkpoint) in error_of(checkpoint)


@pytest.mark.parametrize("replace_with", [None, os.mkfifo, os.mkdir], ids=["nothing", "pipe", "folder"])
def test_no_file(checkpoint: Path, replace_with: Callable[[Path], None] | None) -> None:
    (checkpoint / "braid.json").unlink()
    if replace_with:
        replace_with(checkpoint / "braid.json")
    assert error_of(checkpoint.parent).startswith(f"{checkpoint} is damaged: braid.json is missing; move {checkpoint} away")


def test_a_checkpoint_that_was_renamed(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.parent / "step_00000009")
    assert "braid.json is of step 7, which the folder's name does not say" in error_of(renamed.parent)


@pytest.mark.parametrize(("version", "words"), [(1, "could run commands and are not read any more"), (3, "has format 3; this")])
def test_other_formats(checkpoint: Path, version: int, words: str) -> None:
    (checkpoint / "braid.json").write_text(json.dumps({"format_version": version}))
    message = error_of(checkpoint.parent)
    assert words in message
    assert "train on with the Braid that wrote it, or give another folder to --load" in message


@pytest.mark.parametrize("model", [{}, {"units": 3}, {"units": {"llm": None}}, {"units": {"llm": {"layers": [None]}}}])
def test_a_model_that_is_none(checkpoint: Path, model: dict[str, Any]) -> None:
    graph = ModelGraph((Unit("llm", Role.BACKBONE, Transformer(1, 8, 2, 8)),), ())
    manifest = Manifest(**{**vars(MANIFEST), "model": model})
    with pytest.raises(CheckpointError, match="its model cannot be read"):
        check_model(checkpoint, manifest, graph=graph)


FILES = {"rank_00000.bin": 48, "rank_00001.bin": 24}
INDEX = {
    "model.llm.weight": SavedTensor(
        torch.float32,
        (4, 3),
        (SavedPiece("rank_00000.bin", 0, (0, 0), (2, 3), 7), SavedPiece("rank_00001.bin", 0, (2, 0), (2, 3), 8)),
    ),
    "model.llm.bias": SavedTensor(torch.bfloat16, (3,), (SavedPiece("rank_00000.bin", 24, (0,), (3,), 9),)),
}


@pytest.fixture
def unwritten(tmp_path: Path) -> Path:
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    return folder


def read(unwritten: Path, content: bytes) -> TensorIndex:
    (unwritten / INDEX_NAME).write_bytes(content)
    return read_index(unwritten, files=FILES, crc32=zlib.crc32(content))


def test_an_index_that_was_written_comes_back(unwritten: Path) -> None:
    assert read(unwritten, index_to_json(INDEX)) == INDEX


def test_the_index_of_another_checkpoint(unwritten: Path) -> None:
    (unwritten / INDEX_NAME).write_bytes(index_to_json(INDEX))
    with pytest.raises(CheckpointError, match=r"step_00000003 is damaged: tensors\.json is not the one that was written"):
        read_index(unwritten, files=FILES, crc32=3)


def read_manifest(document: Mapping[str, Any]) -> None:
    """Read a manifest that was changed, with a checksum that fits."""
    folder = Path("step_00000007")
    folder.mkdir(exist_ok=True)
    (folder / "rank_00000.bin").write_bytes(b"abc")
    write_manifest(folder, MANIFEST)
    value = json.loads((folder / "braid.json").read_text())
    del value["crc32"]
    value = changed(value, document["change"])
    text = json.dumps({**value, "crc32": zlib.crc32(json.dumps(value, sort_keys=True).encode())})
    (folder / "braid.json").write_text(text)
    read_newest(folder)


def read_changed_index(document: Any) -> None:
    folder = Path("step_00000003")
    folder.mkdir(exist_ok=True)
    read(folder, json.dumps(document).encode())


def read_contents(document: Mapping[str, Any]) -> None:
    """Read a manifest, or an index, of these bytes, some of which follow each other many times."""
    if not document["file"]:
        return
    content = (document["begin"] + document["repeat"] * document["times"] + document["end"]).encode("latin-1")
    folder = Path("step_00000007")
    folder.mkdir(exist_ok=True)
    if document["file"] == INDEX_NAME:
        read(folder, content)
    (folder / "braid.json").write_bytes(content)
    read_newest(folder)


NO_CONTENTS = {"file": "", "begin": "", "repeat": "", "times": 1, "end": ""}
CHECKPOINTS: Kinds = {
    "contents": (NO_CONTENTS, read_contents),
    "manifest": ({"change": {}}, read_manifest),
    "index": (json.loads(index_to_json(dict(zip(("weight", "bias"), INDEX.values(), strict=True)))), read_changed_index),
}
test_every_change_is_answered_as_written = golden_test("checkpoints.txt", CHECKPOINTS)
