"""Headers, sizes and places of safetensors files, before anything is written."""

import json

import pytest
import torch

from megatron.runtime.hugging_face import file_layout
from megatron.runtime.hugging_face.file_layout import cut_into_files, like_files
from megatron.runtime.hugging_face.named_weights import NamedWeights, Shape
from megatron.runtime.hugging_face.weight_files import SavedWeight

NAMES = NamedWeights({}, {"a.weight": Shape(3, 4), "b.bias": Shape(5, 1), "c.weight": Shape(2, 6)})


def header_of(content: bytes) -> dict[str, object]:
    size = int.from_bytes(content[:8], "little")
    assert len(content) == 8 + size
    assert size % 8 == 0
    return json.loads(content[8:])


def test_files_are_cut_at_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "MOST_BYTES", 70)
    layout = cut_into_files(NAMES, torch.float32, is_vector={"b.bias"})
    assert list(layout.headers) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert header_of(layout.headers["model-00001-of-00002.safetensors"]) == {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "b.bias": {"dtype": "F32", "shape": [5], "data_offsets": [48, 68]},
    }
    assert layout.index is not None
    assert layout.index["metadata"] == {"total_parameters": 29, "total_size": 116}
    place = layout.weights["a.weight"]
    assert place.position(2, 1) - place.start == 9 * 4
    assert layout.sizes[place.file] == len(layout.headers[place.file]) + 68


def test_a_layout_follows_other_files_with_more_rows() -> None:
    found = {
        "a.weight": SavedWeight("one.safetensors", torch.bfloat16, (2, 4)),
        "b.bias": SavedWeight("one.safetensors", torch.float32, (5,)),
        "c.weight": SavedWeight("two.safetensors", torch.bfloat16, (2, 2, 3)),
        "kept": SavedWeight("two.safetensors", torch.bfloat16, (2,)),
    }
    layout = like_files(NAMES, found, {"one.safetensors": {}, "two.safetensors": {"format": "pt"}})
    assert header_of(layout.headers["one.safetensors"]) == {
        "b.bias": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]},
        "a.weight": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [20, 44]},
    }
    assert header_of(layout.headers["two.safetensors"])["c.weight"] == {
        "dtype": "BF16",
        "shape": [2, 2, 3],
        "data_offsets": [0, 24],
    }
    assert layout.weights["c.weight"].position(1, 2) - layout.weights["c.weight"].start == 2 * 8


def test_one_file_needs_no_index() -> None:
    layout = cut_into_files(NAMES, torch.float16, is_vector=set())
    assert list(layout.headers) == ["model.safetensors"]
    assert layout.index is None
