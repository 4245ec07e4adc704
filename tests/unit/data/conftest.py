"""Small model graphs, images and manifests that the tests of the data package share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.model_graph import ModelGraph

_SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
_ENCODER = {"role": "encoder", **_SHAPE, "image": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}}
_BACKBONE = {"role": "backbone", **_SHAPE}


@pytest.fixture
def graph() -> ModelGraph:
    """An encoder of 4-pixel patches merged 2x2, at most 1024 pixels, and an LLM."""
    return ModelGraph.from_dict({"units": {"vision": _ENCODER, "llm": _BACKBONE}})


@pytest.fixture
def text_graph() -> ModelGraph:
    """An LLM alone."""
    return ModelGraph.from_dict({"units": {"llm": _BACKBONE}})


@pytest.fixture
def two_encoder_graph() -> ModelGraph:
    """Two encoders that take images, and one that takes sound."""
    ear = {"role": "encoder", **_SHAPE, "has_rotary_positions": False, "audio": {"num_mel_bins": 4, "max_tokens": 50}}
    return ModelGraph.from_dict({"units": {"vision": _ENCODER, "sketch": _ENCODER, "ear": ear, "llm": _BACKBONE}})


@pytest.fixture
def write_audio(tmp_path: Path) -> Callable[..., str]:
    """Write a WAV file of noise into the manifest's folder and return its name."""

    def write(name: str, num_samples: int, *, rate: int = 16000, dtype: Any = np.int16, channels: int = 1) -> str:
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (num_samples, channels))
        scale = 1.0 if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
        shift = 128 if dtype == np.uint8 else 0
        values = (noise * (127 if shift else scale) + shift).astype(dtype)
        wavfile.write(tmp_path / name, rate, values[:, 0] if channels == 1 else values)
        return name

    return write


@pytest.fixture
def painter_graph() -> ModelGraph:
    """The same encoder, an LLM, and a generator of 8-pixel patches."""
    image = {"patch_size": 8, "merge_size": 1, "min_pixels": 64, "max_pixels": 1024}
    painter = {"role": "generator", **_SHAPE, "image": image}
    return ModelGraph.from_dict({"units": {"vision": _ENCODER, "llm": _BACKBONE, "painter": painter}})


@pytest.fixture
def write_image(tmp_path: Path) -> Callable[..., str]:
    """Write a random image of (width, height) and return its name."""

    def write(name: str, size: tuple[int, int], seed: int = 0) -> str:
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
        return name

    return write


@pytest.fixture
def write_manifest(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (text and bytes as they are, lists of segments as a sample) and return the manifest's path."""

    def write(lines: Sequence[Any]) -> Path:
        path = tmp_path / "manifest.jsonl"
        path.write_bytes(b"".join(_line(line, number) + b"\n" for number, line in enumerate(lines, start=1)))
        return path

    return write


@pytest.fixture
def open_manifest(write_manifest: Callable[..., Path], graph: ModelGraph) -> Callable[..., ManifestSource]:
    """Write lines and index them."""

    def build(lines: Sequence[Any], *, seq_length: int = 1000, graph: ModelGraph = graph, **options: Any) -> ManifestSource:
        return ManifestSource(write_manifest(lines), graph=graph, tokenizer=ByteTokenizer(), seq_length=seq_length, **options)

    return build


def _line(line: Any, number: int) -> bytes:
    if isinstance(line, bytes):
        return line
    sample = {"id": f"s{number}", "segments": line} if isinstance(line, list) else line
    return (line if isinstance(line, str) else json.dumps(sample)).encode()
