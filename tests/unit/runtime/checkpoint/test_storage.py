"""`tensors.json`: what was written comes back; what cannot be is a CheckpointError that names it."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.runtime.checkpoint.storage import INDEX_NAME, SavedPiece, SavedTensor, TensorIndex, index_to_json, read_index
from multimodal.values.errors import CheckpointError

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
def checkpoint(tmp_path: Path) -> Path:
    """The folder of a checkpoint, empty so far."""
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    return folder


def read(checkpoint: Path, content: bytes) -> TensorIndex:
    (checkpoint / INDEX_NAME).write_bytes(content)
    return read_index(checkpoint, files=FILES, crc32=zlib.crc32(content))


def test_what_was_written_comes_back(checkpoint: Path) -> None:
    assert read(checkpoint, index_to_json(INDEX)) == INDEX


def test_the_index_of_another_checkpoint(checkpoint: Path) -> None:
    (checkpoint / INDEX_NAME).write_bytes(index_to_json(INDEX))
    with pytest.raises(CheckpointError, match=r"step_00000003 is damaged: tensors\.json is not the one that was written"):
        read_index(checkpoint, files=FILES, crc32=3)


WEIGHT = "model.llm.weight"
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tensor that is text": (lambda value: value.update(x="y"), "x: expected a mapping"),
    "no dtype": (lambda value: value[WEIGHT].pop("dtype"), "'dtype' is missing"),
    "an unknown dtype": (lambda value: value[WEIGHT].update(dtype="load"), "float16, found 'load'"),
    "a dtype that is a list": (lambda value: value[WEIGHT].update(dtype=["float32"]), "dtype: expected one of"),
    "no shape": (lambda value: value[WEIGHT].pop("shape"), "'shape' is missing"),
    "a fraction": (lambda value: value[WEIGHT].update(shape=[4.0, 3]), "shape[0]: expected a positive integer, found 4.0"),
    "another shape": (lambda value: value[WEIGHT].update(shape=[5, 3]), "its pieces do not fill the shape [5, 3]"),
    "a smaller shape": (lambda value: value[WEIGHT].update(shape=[3, 3]), "leaves the shape [3, 3]"),
    "fewer dimensions": (lambda value: value[WEIGHT].update(shape=[12]), "leaves the shape [12]"),
    "no pieces": (lambda value: value[WEIGHT].update(pieces=[]), "do not fill"),
    "a piece too few": (lambda value: value[WEIGHT]["pieces"].pop(), "do not fill"),
    "a short piece": (lambda value: value[WEIGHT]["pieces"][0].pop(), "pieces[0]: expected a list of 5 entries"),
    "a negative start": (lambda value: value[WEIGHT]["pieces"][0].__setitem__(1, -1), "an integer of at least 0, found -1"),
    "a start too late": (lambda value: value[WEIGHT]["pieces"][1].__setitem__(1, 1), "'rank_00001.bin' from byte 1"),
    "a file elsewhere": (lambda value: value[WEIGHT]["pieces"][1].__setitem__(0, "../x"), "'../x' from byte 0"),
    "a file that is a number": (lambda value: value[WEIGHT]["pieces"][1].__setitem__(0, 1), "expected text, found 1"),
    "an empty piece": (lambda value: value[WEIGHT]["pieces"][1].__setitem__(3, [0, 3]), "a piece of [0, 3] at [2, 0] leaves"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_cannot_be(checkpoint: Path, name: str) -> None:
    change, words = CHANGES[name]
    value = json.loads(index_to_json(INDEX))
    change(value)
    with pytest.raises(CheckpointError) as problem:
        read(checkpoint, json.dumps(value).encode())
    assert str(problem.value).startswith(f"{checkpoint} is damaged: tensors.json cannot be used (")
    assert words in str(problem.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 200_000, b'{"x": ' + b"9" * 9_999 + b"}", b"{}x"])
def test_contents_that_are_no_index(checkpoint: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tensors\.json cannot be used \("):
        read(checkpoint, content)
