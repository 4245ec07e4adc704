"""Small model graphs, images and manifests that the tests of the data package share."""

import json
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.manifest import ManifestSource
from multimodal.data.remote import DataPath
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ModelGraph

_SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
_ENCODER = {"role": "encoder", **_SHAPE, "image": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}}
_BACKBONE = {"role": "backbone", **_SHAPE}
UNITS = {"vision": _ENCODER, "llm": _BACKBONE}
PAINTER = {"role": "generator", **_SHAPE, "image": {"patch_size": 8, "merge_size": 1, "min_pixels": 64, "max_pixels": 1024}}
"""A generator of 8-pixel patches."""


@pytest.fixture
def graph() -> ModelGraph:
    """An encoder of 4-pixel patches merged 2x2, at most 1024 pixels, and an LLM."""
    return ModelGraph.from_dict({"units": UNITS})


@pytest.fixture
def text_graph() -> ModelGraph:
    return ModelGraph.from_dict({"units": {"llm": _BACKBONE}})


@pytest.fixture
def two_encoder_graph() -> ModelGraph:
    ear = {"role": "encoder", **_SHAPE, "has_rotary_positions": False, "audio": {"num_mel_bins": 4, "max_tokens": 50}}
    return ModelGraph.from_dict({"units": {"vision": _ENCODER, "sketch": _ENCODER, "ear": ear, "llm": _BACKBONE}})


@pytest.fixture
def painter_graph() -> ModelGraph:
    return ModelGraph.from_dict({"units": {**UNITS, "painter": PAINTER}})


class DataFolder:
    """A folder into which tests write images, clips and manifests."""

    def __init__(self, path: Path, graph: ModelGraph) -> None:
        self.path, self.graph = path, graph

    def audio(self, name: str, num_samples: int, *, rate: int = 16000, dtype: Any = np.int16, channels: int = 1) -> str:
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (num_samples, channels))
        scale = 1.0 if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
        shift = 128 if dtype == np.uint8 else 0
        values = (noise * (127 if shift else scale) + shift).astype(dtype)
        wavfile.write(self.path / name, rate, values[:, 0] if channels == 1 else values)
        return name

    def image(self, name: str, size: tuple[int, int], seed: int = 0) -> str:
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(self.path / name)
        return name

    def manifest(self, lines: Sequence[Any]) -> Path:
        """Write lines (text and bytes as they are, lists of segments as a sample) and return the manifest's path."""
        path = self.path / "manifest.jsonl"
        path.write_bytes(b"".join(_line(line, number) + b"\n" for number, line in enumerate(lines, start=1)))
        return path

    def entries(self, entries: Sequence[Any], name: str = "data.jsonl") -> Path:
        """Write entries, one a line or as a list in JSON, and return the file's path."""
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (self.path / name).write_text(lines if name.endswith("l") else json.dumps(entries, indent=1))
        return self.path / name

    def open(self, data: Sequence[Any] | DataPath, *, seq_length: int = 1000, **options: Any) -> ManifestSource:
        """Index lines, or a file or folder."""
        path = data if isinstance(data, DataPath) else self.manifest(data)
        own = {key: options.pop(key) for key in options.keys() & {field.name for field in fields(IndexOptions)}}
        files, index_options = open_sample_files(path, options.pop("remote", None)), IndexOptions(seq_length, **own)
        return ManifestSource(files, **{"graph": self.graph, "tokenizer": ByteTokenizer(), "options": index_options, **options})


def assert_same(found: ManifestSource, expected: ManifestSource) -> None:
    assert (len(found), found.skipped, found.num_cut) == (len(expected), expected.skipped, expected.num_cut)
    for index in range(len(expected)):
        assert found.lengths(index) == expected.lengths(index)
        for one, other in zip(astuple(found.text(index)), astuple(expected.text(index)), strict=True):
            np.testing.assert_array_equal(one, other)
        for item in range(len(found.lengths(index).items)):
            np.testing.assert_array_equal(found.item(index, item).patches, expected.item(index, item).patches)


@pytest.fixture
def data(tmp_path: Path, graph: ModelGraph) -> DataFolder:
    return DataFolder(tmp_path, graph)


def _line(line: Any, number: int) -> bytes:
    if isinstance(line, bytes):
        return line
    sample = {"id": f"s{number}", "segments": line} if isinstance(line, list) else line
    return (line if isinstance(line, str) else json.dumps(sample)).encode()
