"""Sources made of sources: parts of one, mixtures, and views with other pixels."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data.mixture import NamedData, read_mixture
from multimodal.data.source_views import BlankImages, ReadableItems, SourceSubset
from multimodal.data.splits import parse_split, split_indices
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph
from tests.unit.data.conftest import DataFolder


@given(st.integers(3, 500), st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 999)), st.integers(0, 9))
def test_parts_cover_all_samples_in_their_shares(num_samples: int, shares: tuple[int, int, int], seed: int) -> None:
    """Disjoint, complete, deterministic, within one sample of the exact share (two where one was given away)."""
    text = ",".join(map(str, shares))
    parts = split_indices(num_samples, split=text, seed=seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_samples))
    again = split_indices(num_samples, split=text, seed=seed)
    for part, other, share in zip(parts, again, shares, strict=True):
        assert part.tolist() == other.tolist() == sorted(part.tolist())
        assert abs(len(part) - num_samples * share / sum(shares)) <= 2
    assert len(parts.train) and (len(parts.valid) or not shares[1])


def test_the_seed_shuffles() -> None:
    """A corpus sorted by origin must not end in a validation set of one origin."""
    parts = [tuple(split_indices(100, split="90,10,0", seed=seed).valid) for seed in (0, 1)]
    assert parts[0] != parts[1] and tuple(range(90, 100)) not in parts


def test_parts_that_cannot_be_filled() -> None:
    """Too few samples for the parts that are asked for."""
    with pytest.raises(DataError, match="--split 969,30,1 of 1 samples leaves none for 'train'"):
        split_indices(1, split="969,30,1", seed=0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2,0", "0,0,0", "inf,1", "nan"])
def test_malformed_splits(split: str) -> None:
    """Anything but shares: the rules of the flags refuse it."""
    assert parse_split(split) == []


def test_a_subset_is_a_source(data: DataFolder) -> None:
    """Its lengths carry its own indices."""
    source = data.open([[{"type": "text", "role": "document", "text": "x" * size}] for size in (1, 2, 3)])
    subset = SourceSubset(source, np.array([2, 0]))
    assert len(subset) == 2
    assert [(subset.lengths(index).sample_id, subset.lengths(index).num_target_tokens) for index in (0, 1)] == [(0, 4), (1, 2)]
    assert subset.text(0).token_ids.tolist() == source.text(2).token_ids.tolist()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.7", "a", "3e-1", "b"], [("a", 0.7), ("b", 0.3)]),
        (["2", "a"], [("a", 2.0)]),
    ],
)
def test_weights_stand_before_every_path_or_before_none(words: list[str], expected: list[tuple[str, float | None]]) -> None:
    assert read_mixture(words) == tuple(NamedData(*each) for each in expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["0.7", "a", "b"],
            r"--data-path 0.7 a b: expected a weight before every path \(0.7 a.jsonl 0.3 b.jsonl\) or before none",
        ),
        (["a", "0.7"], "expected a weight before every path"),
        (["1", "2"], "expected a weight before every path"),
        (["0.7"], "expected a weight before every path"),
        (["0", "a", "1", "b"], "--data-path 0 a: the weight must be above 0"),
        (["nan", "a", "1", "b"], "--data-path nan a: the weight must be above 0"),
        (["1", "a", "inf", "b"], "--data-path inf b: the weight must be above 0"),
        (["a", "b", "a"], "--data-path: a is there twice; give it once"),
    ],
)
def test_anything_else_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_mixture(words)


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
