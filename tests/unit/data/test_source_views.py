"""A source without its pixels: same texts and lengths."""

import os
from pathlib import Path

import numpy as np

from multimodal.data.source_views import BlankImages, ReadableItems
from multimodal.values.model_graph import ModelGraph
from tests.unit.data.conftest import DataFolder


def test_only_the_pixels_differ(data: DataFolder, graph: ModelGraph, tmp_path: Path) -> None:
    """Zeros of the right shape, without touching the file."""
    segments = [{"type": "image", "path": data.image("a.png", (24, 16))}, {"type": "text", "role": "assistant", "text": "yes"}]
    source = data.open([segments])
    blank = BlankImages(source, graph=graph)
    seen = source.item(0, 0)
    os.remove(tmp_path / "a.png")
    unseen = blank.item(0, 0)
    assert len(blank) == 1 and blank.lengths(0) == source.lengths(0) and blank.item_grid(0, 0) == source.item_grid(0, 0)
    np.testing.assert_array_equal(blank.text(0).token_ids, source.text(0).token_ids)
    assert unseen.grid == seen.grid and unseen.patches.shape == seen.patches.shape and unseen.patches.dtype == np.float32
    assert np.abs(seen.patches).max() > 0 and not unseen.patches.any()


def test_a_class_token_has_no_pixels(data: DataFolder, graph: ModelGraph) -> None:
    described = graph.to_dict()
    described["units"]["vision"]["image"] |= {"image_size": 16, "class_token": "dropped"}
    changed = ModelGraph.from_dict(described)
    segments = [{"type": "image", "path": data.image("a.png", (24, 16))}, {"type": "text", "role": "assistant", "text": "yes"}]
    source = data.open([segments], graph=changed)
    assert source.lengths(0).items[0].num_tokens == 17
    assert BlankImages(source, graph=changed).item(0, 0).patches.shape == source.item(0, 0).patches.shape == (16, 48)


def test_what_is_to_be_made_is_not_blanked(data: DataFolder, painter_graph: ModelGraph) -> None:
    image = {"type": "image", "path": data.image("a.png", (24, 16))}
    source = data.open([[image, {**image, "role": "assistant"}]], graph=painter_graph)
    blank = BlankImages(source, graph=painter_graph)
    assert not blank.item(0, 0).patches.any()
    np.testing.assert_array_equal(blank.item(0, 1).patches, source.item(0, 1).patches)


def test_items_that_cannot_be_read_are_empty_and_noted(data: DataFolder, painter_graph: ModelGraph, tmp_path: Path) -> None:
    image = {"type": "image", "path": data.image("a.png", (24, 16))}
    made = {**image, "path": data.image("b.png", (24, 16)), "role": "assistant"}
    source = data.open([[image, made], [image, made]], graph=painter_graph)
    seen = source.item(0, 0), source.item(0, 1)
    readable = ReadableItems(source, graph=painter_graph)
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:200])
    found = readable.item(1, 0), readable.item(1, 1)
    np.testing.assert_array_equal(found[0].patches, seen[0].patches)
    assert found[1].grid == seen[1].grid and found[1].patches.shape == seen[1].patches.shape
    assert found[1].patches.dtype == np.uint8 and not found[1].patches.any()
    assert list(readable.problems) == [1] and "b.png cannot be decoded as an image" in readable.problems[1]


def test_sound_is_silent(data: DataFolder, two_encoder_graph: ModelGraph) -> None:
    clip = {"type": "audio", "path": data.audio("a.wav", 1601)}
    source = data.open([[clip, {"type": "text", "role": "assistant", "text": "yes"}]], graph=two_encoder_graph)
    silent, seen = BlankImages(source, graph=two_encoder_graph).item(0, 0), source.item(0, 0)
    assert silent.grid == seen.grid and silent.patches.shape == seen.patches.shape and set(silent.patches.flatten()) == {-1.5}
