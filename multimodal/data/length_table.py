"""Reads lengths of real data sets: one row per sample with image sizes, text tokens and seconds of audio."""

import csv
import gzip
import importlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from multimodal.data.image_processing import image_grid
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

AUDIO_TOKENS_PER_SECOND = 50
"""Whisper's encoder: 100 frames a second, halved by its convolutions."""
_TEXT_COLUMNS = ("text_tokens", "text_tokens_gpt2")
_COLUMNS = ("image_sizes", *_TEXT_COLUMNS, "audio_seconds")


def read_length_table(path: str | Path, *, graph: ModelGraph) -> tuple[SampleLengths, ...]:
    """Read a .csv, .csv.gz or .parquet file with any of image_sizes, text_tokens (or text_tokens_gpt2) and audio_seconds.

    image_sizes: `WxH;WxH;...` in pixels, cut into patches as the image encoder would. Audio has as many tokens a second as its
    encoder says (50 where it says nothing); `merge_factor` of them become one token of the LLM. An encoder with `audio` as its
    input or in its name takes the audio, the first other one the images; what the model has no encoder for is left out.
    answer_words / text_words, where given, is the share of text that counts in the loss, else all of it. A sample's id is its
    row's number; it has at least one text token.

    Raises DataError naming the file and row. Parquet needs pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; give a .csv, .csv.gz or .parquet file of lengths")
    image_encoder = next((unit for unit in graph.encoders if not _is_audio(unit)), None)
    audio_encoder = next((unit for unit in graph.encoders if _is_audio(unit)), None)
    samples = []
    for index, row in enumerate(_read_rows(path)):
        try:
            items = [*_images(row, image_encoder), *_audio(row, audio_encoder)]
            num_text_tokens = max(1, _number(row, next((name for name in _TEXT_COLUMNS if row.get(name)), "")))
            share = _number(row, "answer_words") / (_number(row, "text_words") or 1) if row.get("answer_words") else 1.0
        except ValueError as problem:
            raise DataError(f"{path}, row {index + 1}: {problem}") from None
        num_targets = min(num_text_tokens, max(1, round(num_text_tokens * share)))
        samples.append(SampleLengths(index, tuple(items), num_text_tokens, num_targets))
    if not samples:
        raise DataError(f"{path}: has no rows; give a file with at least one sample")
    return tuple(samples)


def _is_audio(unit: Unit) -> bool:
    return unit.audio is not None or "audio" in unit.name


def _read_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.name.endswith((".csv", ".csv.gz")):
        try:
            with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as problem:
            raise DataError(f"{path}: cannot be read as csv ({problem}); replace the file") from problem
    else:
        raise DataError(f"{path}: expected a .csv, .csv.gz or .parquet file")
    if rows and not set(rows[0]) & set(_COLUMNS):
        raise DataError(f"{path}: none of the columns {', '.join(_COLUMNS)} is there; found {', '.join(map(str, rows[0]))}")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as problem:
        raise DataError(f"{path}: reading parquet needs the package pyarrow; install it, or give the lengths as csv") from problem
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read as parquet ({problem}); replace the file") from problem
    return rows


def _images(row: Mapping[str, Any], encoder: Unit | None) -> Iterable[ItemLengths]:
    if encoder is None or encoder.image is None:
        return
    for size in filter(None, str(row.get("image_sizes") or "").split(";")):
        width, separator, height = size.partition("x")
        if not separator or not width.isdigit() or not height.isdigit():
            raise ValueError(f"image_sizes has '{size}', expected WxH")
        rows, columns = image_grid(width=int(width), height=int(height), image_input=encoder.image)
        yield ItemLengths(encoder.name, rows * columns, rows * columns // encoder.image.merge_size**2)


def _audio(row: Mapping[str, Any], encoder: Unit | None) -> Iterable[ItemLengths]:
    seconds = float(row.get("audio_seconds") or 0.0)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"audio_seconds is {seconds}, expected a number of at least 0")
    if encoder is None or not seconds:
        return
    num_tokens = math.ceil(seconds * (encoder.audio.tokens_per_second if encoder.audio else AUDIO_TOKENS_PER_SECOND))
    yield ItemLengths(encoder.name, num_tokens, math.ceil(num_tokens / encoder.merge_factor))


def _number(row: Mapping[str, Any], name: str) -> int:
    number = float(row.get(name) or 0)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {number}, expected a number of at least 0")
    return int(number)
