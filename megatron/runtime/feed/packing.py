"""Packs atoms into microbatches: concatenated sequences of variable length, without padding."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multimodal.data.audio import audio_positions
from multimodal.data.image_processing import patch_positions
from multimodal.data.sample_source import SampleSource
from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import Atom
from multimodal.values.model_graph import AudioInput, ImageInput, ItemInput
from multimodal.values.units.items import Grid

CLASS_POSITION = -1
"""Row and column of a class token, which has no position in its image."""


def pack_encoder_microbatch(
    atoms: Sequence[Atom], *, source: SampleSource, item_input: ItemInput | None, with_pixels: bool
) -> PackedInput:
    """Pack items for an encoder, decoding them only `with_pixels` (first stages need pixels, later ones only positions).

    Positions are (row, column) of each patch in its image; CLASS_POSITION twice for a class token, and one less for each register
    behind it. If learned positions are interpolated, the image's numbers of rows and columns follow; for sound see
    `audio_positions`. source: has samples by their ids. Raises DataError if an item cannot be decoded.
    """
    assert item_input is not None
    positions = [_positions(source.item_grid(*atom), item_input) for atom in atoms]
    patches = [_with_class(source.item(*atom).patches, item_input) for atom in atoms] if with_pixels else None
    joined = torch.from_numpy(np.concatenate(patches)) if patches is not None else None
    return PackedInput(tuple(map(len, positions)), torch.from_numpy(np.concatenate(positions)), patches=joined)


def pack_language_microbatch(
    atoms: Sequence[Atom], *, source: SampleSource, images: Mapping[str, ImageInput] | None = None
) -> tuple[PackedInput, dict[Atom, tuple[int, int]]]:
    """Pack whole samples for the LLM, and return (start, length) of the placeholders of each item among the tokens, too.

    images: of each image encoder, if tokens of images have a time, rows and columns in the LLM; None: positions are indices.
    """
    texts = [source.text(atom.sample_id) for atom in atoms]
    lengths = tuple(len(text.token_ids) for text in texts)
    item_spans = {
        Atom(atom.sample_id, item_index): (sample_start + start, length)
        for atom, text, sample_start in zip(atoms, texts, accumulate(lengths, initial=0), strict=False)
        for item_index, start, length in text.item_starts
    }
    if images is None:
        positions = _joined(map(np.arange, lengths), shape=(0,))
    else:
        positions = _joined((_spatial_positions(source, atom.sample_id, images=images) for atom in atoms), shape=(0, 3))
    target_rows = np.flatnonzero(_joined((text.is_target for text in texts), dtype=np.bool_))
    packed = PackedInput(
        lengths=lengths,
        positions=torch.from_numpy(positions),
        token_ids=torch.from_numpy(_joined(text.token_ids for text in texts)),
        target_rows=torch.from_numpy(target_rows),
        targets=torch.from_numpy(_joined(text.labels for text in texts)[target_rows]),
    )
    return packed, item_spans


def _joined(parts: Iterable[npt.NDArray[Any]], *, shape: tuple[int, ...] = (0,), dtype: type = np.int64) -> npt.NDArray[Any]:
    """Concatenate; shape, dtype: of an empty result."""
    return np.concatenate((np.empty(shape, dtype), *parts))


def _positions(grid: Grid, item_input: ItemInput) -> npt.NDArray[np.int64]:
    if isinstance(item_input, AudioInput):
        return audio_positions(grid, audio=item_input)
    places = patch_positions(grid, merge_size=item_input.merge_size)
    if item_input.position_grid is not None and item_input.image_size is None:
        places = np.concatenate((places, np.broadcast_to(np.array(grid[:2]), places.shape)), axis=1)
    return _with_class(places, item_input, first=CLASS_POSITION)


def _with_class(rows: npt.NDArray[Any], item_input: ItemInput, *, first: int = 0) -> npt.NDArray[Any]:
    """Add rows for a class token, filled with `first`, and registers, one less each; behind patches if dropped later.

    first: 0 fills all of these rows with 0.
    """
    if isinstance(item_input, AudioInput) or item_input.class_token is None:
        return rows
    values = first - np.arange(item_input.num_class_tokens) * (first != 0)
    more = np.broadcast_to(values[:, None], (len(values), rows.shape[1])).astype(rows.dtype)
    return np.concatenate((more, rows) if item_input.class_token == "kept" else (rows, more))


def _spatial_positions(source: SampleSource, index: int, *, images: Mapping[str, ImageInput]) -> npt.NDArray[np.int64]:
    """Return [num_tokens, 3] for a sample, by Qwen2-VL's rule (M-RoPE).

    Text and sound advance by one on all three axes. The tokens of an image share a time, and have rows and columns from there on;
    text behind it continues after its longer side. Steps of a video that follow each other begin at one place, and have times.
    """
    text, units = source.text(index), [item.unit for item in source.lengths(index).items]
    parts, done, position = [], 0, 0
    began: int | None = None  # position of the video whose step ends at `done`
    for item, start, length in sorted(text.item_starts, key=lambda entry: entry[1]):
        if length == 0 or units[item] not in images:  # made by a generator, or sound, which only has a time
            continue
        image = images[units[item]]
        rows, columns, *times = source.item_grid(index, item)
        rows, columns = rows // image.merge_size, columns // image.merge_size
        if times and start == done and began is not None:
            position = began
        parts.append(_text_positions(position, start - done))
        position += start - done
        places = np.meshgrid(times or [0], np.arange(rows), np.arange(columns), indexing="ij")
        parts.append(np.stack(places, axis=-1).reshape(-1, 3) + position)
        began = position if times else None
        ends_at_time = image.video is not None and image.video.ends_at_last_time
        last_time = times[0] + 1 if times and ends_at_time else 0
        done, position = start + length, position + max(rows, columns, last_time)
    return np.concatenate([*parts, _text_positions(position, len(text.token_ids) - done)]).astype(np.int64)


def _text_positions(first: int, count: int) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(first, first + count)[:, None], 3, axis=1)
