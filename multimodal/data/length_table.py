"""Lengths of samples: read from or written to a table of a data set with one row per sample, or all alike."""

import csv
import gzip
import importlib
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from multimodal.data.audio import SAMPLING_RATE
from multimodal.data.image_processing import image_grid, num_tiles
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, pass_items

MOST_SAMPLES = 4096
"""Samples whose lengths are a run's table, and what a plan is made from: the first of the training."""
AUDIO_TOKENS_PER_SECOND = 50
"""Whisper's encoder: 100 frames a second, halved by its convolutions."""
_CSV_TEXT: Mapping[str, Any] = {"newline": "", "encoding": "utf-8-sig"}
_MAX_NUMBER = 2**31 - 1
"""The most tokens, words or seconds of a sample, so that the balancers' sums are exact."""
_MAX_DIGITS = 10
_TEXT_COLUMNS = ("text_tokens", "text_tokens_gpt2")
_COLUMNS = ("image_sizes", "items", *_TEXT_COLUMNS, "audio_seconds")


def read_length_table(path: str | Path, *, graph: ModelGraph) -> tuple[SampleLengths, ...]:
    """Read a .csv, .csv.gz or .parquet file with any of image_sizes, text_tokens (or text_tokens_gpt2) and audio_seconds.

    image_sizes: `WxH;WxH;...` in pixels, cut into patches as the image encoder would. Audio has as many tokens per second as its
    encoder says (50 if it says nothing); `merge_factor` of them become one token of the LLM. An encoder with `audio` as its input
    or in its name takes the audio, the first other one the images; items without an encoder in the model are left out.
    answer_words / text_words, if given, is the share of text that counts in the loss, else all of it. A sample's id is its row's
    number; it has at least one text token. Instead of image_sizes and audio_seconds there may be items, and instead of words
    target_tokens, as `write_length_table` writes them.

    Raises DataError naming the file and row (in csv the line, too). Parquet needs pyarrow.
    """
    path = Path(path)
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {problem}; give a .csv, .csv.gz or .parquet file of lengths")
    image_encoder = next((unit for unit in graph.item_encoders if not _is_audio(unit)), None)
    audio_encoder = next((unit for unit in graph.item_encoders if _is_audio(unit)), None)
    samples = []
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.name.endswith((".csv", ".csv.gz")):
        rows = _read_csv(path)
    else:
        raise DataError(f"{path}: expected a .csv, .csv.gz or .parquet file; convert it, or give it the right name")
    if rows and not set(rows[0][1]) & set(_COLUMNS):
        actual = ", ".join(map(str, rows[0][1]))
        raise DataError(f"{path}: none of the columns {', '.join(_COLUMNS)} is there; found {actual}; name one in the header")
    for index, (where, row) in enumerate(rows):
        try:
            found = (*_items(row, graph), *_images(row, image_encoder), *_audio(row, audio_encoder))
            items = pass_items(graph, found)
            num_text_tokens = max(1, int(_number(row, next((name for name in _TEXT_COLUMNS if row.get(name)), ""))))
            num_told = int(_number(row, "target_tokens"))
            share = _number(row, "answer_words") / (_number(row, "text_words") or 1) if row.get("answer_words") else 1.0
        except ValueError as problem:
            raise DataError(f"{path}, {where}: {problem}; correct or remove that row") from None
        num_targets = min(num_text_tokens, max(1, num_told or round(num_text_tokens * share)))
        samples.append(SampleLengths(index, items, num_text_tokens, num_targets))
    if not samples:
        raise DataError(f"{path}: has no rows; give a file with at least one sample")
    return tuple(samples)


def write_length_table(path: str | Path, samples: Iterable[SampleLengths]) -> None:
    """Write lengths as .csv or .csv.gz, items as `UNIT:TOKENS:OUTPUT_TOKENS;...`; raises DataError if that is impossible."""
    path = Path(path)
    try:
        with gzip.open(path, "wt", **_CSV_TEXT) if path.suffix == ".gz" else path.open("w", **_CSV_TEXT) as file:
            rows = csv.writer(file)
            rows.writerow(("items", "text_tokens", "target_tokens"))
            for sample in samples:
                items = ";".join(":".join(map(str, item[:3])) for item in sample.items)
                rows.writerow((items, sample.num_text_tokens, sample.num_target_tokens))
    except OSError as problem:
        raise DataError(f"{path}: cannot be written ({problem.strerror}); give another file") from problem


def uniform_lengths(graph: ModelGraph, *, tokens: Mapping[str, int], num_samples: int) -> tuple[SampleLengths, ...]:
    """Return samples that are all alike, as in papers, with one item for each encoder and generator in `tokens`.

    tokens: unit -> tokens inside it; the backbone's are those of its sequence, of which encoders fill theirs and the rest is
    text, which counts in the loss. Raises DataError for a unit that the model lacks, or a backbone with too few tokens.
    """
    backbone = graph.backbone.name
    if unknown := [name for name in tokens if name not in graph.unit_names]:
        raise DataError(f"lengths are given for '{unknown[0]}'; the model's units are {', '.join(graph.unit_names)}")
    if backbone not in tokens:
        raise DataError(f"no length is given for the backbone; add {backbone}=TOKENS")
    alone = []
    for unit in graph.units:
        if unit.name in tokens and unit.role is not Role.BACKBONE:
            is_encoder = unit.role is Role.ENCODER
            num_outputs = _num_outputs(unit, tokens[unit.name]) if is_encoder else 0
            alone.append(ItemLengths(unit.name, tokens[unit.name], num_outputs))
    items = pass_items(graph, alone)
    num_text_tokens = tokens[backbone] - sum(item.num_output_tokens for item in items)
    if num_text_tokens < 1:
        raise DataError(
            f"{backbone}={tokens[backbone]} tokens have no room for text beside the {tokens[backbone] - num_text_tokens} tokens "
            f"that encoders hand on; raise {backbone}'s length"
        )
    return tuple(SampleLengths(sample, items, num_text_tokens, num_text_tokens) for sample in range(num_samples))


def _num_outputs(encoder: Unit, num_tokens: int) -> int:
    """Return the tokens that leave an encoder for an item with this many tokens inside."""
    return encoder.queries.num_queries if encoder.queries is not None else max(1, num_tokens // encoder.merge_factor)


def _is_audio(unit: Unit) -> bool:
    return unit.audio is not None or "audio" in unit.name


_Rows = list[tuple[str, Mapping[str, Any]]]
"""(place for messages, column -> value)."""


def _read_csv(path: Path) -> _Rows:
    rows: _Rows = []
    try:
        with gzip.open(path, "rt", **_CSV_TEXT) if path.suffix == ".gz" else path.open(**_CSV_TEXT) as file:
            reader = csv.DictReader(file)
            for row in reader:
                where = f"line {reader.line_num}, row {len(rows) + 1}"
                if None in row or None in row.values():
                    width = sum(value is not None for name, value in row.items() if name is not None) + len(row.get(None) or ())
                    expected = len(reader.fieldnames or ())
                    raise DataError(f"{path}, {where}: has {width} values, the header {expected}; complete or remove that row")
                rows.append((where, row))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as problem:
        raise DataError(f"{path}: cannot be read as csv behind row {len(rows)} ({problem}); replace the file") from problem
    return rows


def _read_parquet(path: Path) -> _Rows:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as problem:
        raise DataError(f"{path}: reading parquet needs the package pyarrow; install it, or give the lengths as csv") from problem
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as problem:  # pyarrow raises errors of every kind
        raise DataError(f"{path}: cannot be read as parquet ({problem}); replace the file") from problem
    return [(f"row {number}", row) for number, row in enumerate(rows, start=1)]


def _items(row: Mapping[str, Any], graph: ModelGraph) -> Iterable[ItemLengths]:
    """Return the items that the table lists by their tokens; those of units that the model lacks are left out."""
    for text in filter(None, str(row.get("items") or "").split(";")):
        unit, *counts = text.split(":")
        if len(counts) != 2 or not all(count.isdecimal() and len(count) <= _MAX_DIGITS for count in counts):
            raise ValueError(f"items has '{text[:50]}', expected UNIT:TOKENS:OUTPUT_TOKENS")
        if unit in graph.unit_names:
            yield ItemLengths(unit, int(counts[0]), int(counts[1]))


def _images(row: Mapping[str, Any], encoder: Unit | None) -> Iterable[ItemLengths]:
    if encoder is None or encoder.image is None:
        return
    for size in filter(None, str(row.get("image_sizes") or "").split(";")):
        width, separator, height = size.partition("x")
        if not separator or not all(side.isascii() and side.isdigit() and len(side) <= _MAX_DIGITS for side in (width, height)):
            raise ValueError(f"image_sizes has '{size[:50]}', expected WxH in pixels")
        grid = image_grid(width=int(width), height=int(height), image_input=encoder.image)
        tile = ItemLengths(encoder.name, encoder.image.num_tokens(grid), encoder.num_output_tokens(grid))
        yield from [tile] * num_tiles(width=int(width), height=int(height), image_input=encoder.image)


def _audio(row: Mapping[str, Any], encoder: Unit | None) -> Iterable[ItemLengths]:
    seconds = _number(row, "audio_seconds")
    if encoder is None or not seconds:
        return
    rate = encoder.audio.tokens_per_second if encoder.audio else AUDIO_TOKENS_PER_SECOND
    num_tokens = -(-round(seconds * SAMPLING_RATE) * rate // SAMPLING_RATE)
    yield ItemLengths(encoder.name, num_tokens, _num_outputs(encoder, num_tokens))


def _number(row: Mapping[str, Any], name: str) -> float:
    text = row.get(name)
    try:
        number = float(text or 0)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(f"{name} is {str(text)[:50]!r}, expected a number from 0 to {_MAX_NUMBER:,}")
    return number
