"""Sources made of sources: parts of one, mixtures, and views with other pixels."""

import math
import os
from dataclasses import replace
from itertools import chain
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data import global_batches
from multimodal.data.blend import NamedData
from multimodal.data.global_batches import (
    BLOCK_SIZE,
    MOST_JOINED,
    DataPart,
    GlobalBatches,
    _taken,
    join_samples,
    parse_split,
    split_indices,
)
from multimodal.data.source_views import BlankImages, ReadableItems, SourceSubset
from multimodal.values.arrays.rows import row_starts
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph

SHARES = st.tuples(st.integers(1, 999), st.integers(0, 999), st.integers(0, 999))


@given(st.integers(3, 500), SHARES, st.integers(0, 9), st.sampled_from((BLOCK_SIZE, 64)))
def test_parts_cover_all_samples_in_their_shares(num_samples, shares, seed, size):
    """Disjoint, complete, deterministic, within one sample of the exact share (two where one was given away)."""
    text = ",".join(map(str, shares))
    with mock.patch.object(global_batches, "BLOCK_SIZE", size):
        _taken.cache_clear()
        found, again = ([[*part] for part in split_indices(num_samples, split=text, seed=seed)] for _ in range(2))
        arrays = [np.asarray(part).tolist() for part in split_indices(num_samples, split=text, seed=seed)]
    _taken.cache_clear()
    assert sorted(chain.from_iterable(found)) == list(range(num_samples)) and found == again == arrays
    for part, share in zip(found, shares, strict=True):
        assert part == sorted(part)
        assert abs(len(part) - num_samples * share / sum(shares)) <= 2
    assert found[0] and (found[1] or not shares[1])


def test_the_seed_shuffles():
    """A corpus sorted by origin must not end in a validation set of one origin."""
    parts = [tuple(split_indices(100, split="90,10,0", seed=seed).valid) for seed in (0, 1)]
    assert parts[0] != parts[1] and tuple(range(90, 100)) not in parts


def test_parts_that_cannot_be_filled():
    with pytest.raises(DataError, match="--split 969,30,1 of 1 samples leaves none for 'train'"):
        split_indices(1, split="969,30,1", seed=0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2,0", "0,0,0", "inf,1", "nan"])
def test_malformed_splits(split):
    assert parse_split(split) == []


def test_a_subset_is_a_source(data):
    source = data.open([[{"type": "text", "role": "document", "text": "x" * size}] for size in (1, 2, 3)])
    subset = SourceSubset(source, np.array([2, 0]))
    assert len(subset) == 2
    assert [(subset.lengths(index).sample_id, subset.lengths(index).num_target_tokens) for index in (0, 1)] == [(0, 4), (1, 2)]
    assert subset.text(0).token_ids.tolist() == source.text(2).token_ids.tolist()


def test_ranges_are_taken_one_of_another():
    """As Energon does: numbers of the data set's samples first, then shares of these."""
    assert [*NamedData("a", ranges=((10, 20), (0.5, 1.0), (0.0, 0.5))).samples(100)] == [15, 16]
    assert [*NamedData("a", ranges=((0.25, 0.5),)).samples(10)] == [2, 3, 4]
    assert [*NamedData("a", ranges=((7, math.inf),)).samples(9)] == [7, 8]


def test_only_the_pixels_differ(data, graph, tmp_path):
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


def test_a_class_token_has_no_pixels(data, graph):
    described = graph.to_dict()
    described["units"]["vision"]["image"] |= {"image_size": 16, "class_token": "dropped"}
    changed = ModelGraph.from_dict(described)
    segments = [{"type": "image", "path": data.image("a.png", (24, 16))}, {"type": "text", "role": "assistant", "text": "yes"}]
    source = data.open([segments], graph=changed)
    assert source.lengths(0).items[0].num_tokens == 17
    assert BlankImages(source, graph=changed).item(0, 0).patches.shape == source.item(0, 0).patches.shape == (16, 48)


def test_what_is_to_be_made_is_not_blanked(data, painter_graph):
    image = {"type": "image", "path": data.image("a.png", (24, 16))}
    source = data.open([[image, {**image, "role": "assistant"}]], graph=painter_graph)
    blank = BlankImages(source, graph=painter_graph)
    assert not blank.item(0, 0).patches.any()
    np.testing.assert_array_equal(blank.item(0, 1).patches, source.item(0, 1).patches)


def test_items_that_cannot_be_read_are_empty_and_noted(data, painter_graph, tmp_path):
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


def test_sound_is_silent(data, two_encoder_graph):
    clip = {"type": "audio", "path": data.audio("a.wav", 1601)}
    source = data.open([[clip, {"type": "text", "role": "assistant", "text": "yes"}]], graph=two_encoder_graph)
    silent, seen = BlankImages(source, graph=two_encoder_graph).item(0, 0), source.item(0, 0)
    assert silent.grid == seen.grid and silent.patches.shape == seen.patches.shape and set(silent.patches.flatten()) == {-1.5}


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**40), st.booleans(), st.integers(1, 50))
def test_epochs_visit_every_sample_once(num_samples, global_batch_size, seed, shuffle, block_size):
    """Across the borders of batches and blocks, with sample ids that count on."""
    batches = GlobalBatches((DataPart(num_samples),), global_batch_size, seed, shuffle, block_size=block_size)
    num_steps = -(-3 * num_samples // global_batch_size)
    drawn = [sample for step in range(num_steps) for sample in batches.batch(step)]
    assert [sample.sample_id for sample in drawn] == list(range(num_steps * global_batch_size))
    for epoch in range(3):
        visited = [sample.source_index for sample in drawn[epoch * num_samples : (epoch + 1) * num_samples]]
        assert sorted(visited) == list(range(num_samples))
        assert shuffle or visited == list(range(num_samples))


def test_any_step_can_be_asked_first():
    ahead = GlobalBatches((DataPart(50),), 8, seed=3)
    in_order = [GlobalBatches((DataPart(50),), 8, seed=3).batch(step) for step in range(20)]
    assert [ahead.batch(step) for step in reversed(range(20))] == in_order[::-1]


def test_seed_and_epoch_change_the_order():
    orders = [
        tuple(sample.source_index for sample in GlobalBatches((DataPart(100),), 100, seed=seed).batch(epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_the_order_is_the_same_everywhere():
    """Pinned: another order would break the resumption of existing runs."""
    found = [sample.source_index for sample in GlobalBatches((DataPart(8),), 8, seed=1234).batch(1)]
    assert found == [0, 5, 7, 3, 6, 4, 2, 1]


def test_a_thousand_million_samples_are_shuffled_by_blocks():
    """In memory is the order of one block and that of the blocks, whose samples follow each other at random."""
    batches = GlobalBatches((DataPart(10**9),), 2**10, seed=1)
    drawn = [[sample.source_index for sample in batches.batch(step)] for step in (0, 1023, 1024)]
    blocks = [{index // 2**20 for index in found} for found in drawn]
    assert blocks[0] == blocks[1] != blocks[2] and list(map(len, blocks)) == [1, 1, 1]
    assert len({index for found in drawn for index in found}) == 3 * 2**10 and drawn[0] != sorted(drawn[0])


def test_nothing_to_draw():
    with pytest.raises(DataError, match="0 samples"):
        GlobalBatches((DataPart(0),), 4, seed=1)
    with pytest.raises(ConfigError, match="--global-batch-size is 0"):
        GlobalBatches((DataPart(4),), 0, seed=1)


def blends() -> st.SearchStrategy[tuple[DataPart, ...]]:
    """Draw one to four data sets of single samples or of sequences, with weights."""
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=12)
    weights = st.floats(0.05, 20)
    single = st.builds(DataPart, st.integers(1, 30), weights)
    joined = st.builds(lambda rows, weight: DataPart(len(rows), weight, starts=row_starts(rows)), sizes, weights)
    return st.one_of(*(st.lists(each, min_size=1, max_size=4).map(tuple) for each in (single, joined)))


@given(blends(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 12))
def test_blends_keep_their_weights_and_go_on_where_they_were_left(parts, size, later_size, seed, step):
    """At any step each data set is within two draws of its share, whose epochs visit every sample once.

    A run that goes on from a step, in batches of another size and without the other data sets, takes the next samples.
    """
    whole = GlobalBatches(parts, size, seed)
    positions, total = whole.positions(step), sum(part.weight for part in parts)
    assert sum(positions) == step * size
    drawn = [[sample.source_index for sample in whole.batch(each)] for each in range(step + 20)]
    end = 0
    for part, position in zip(parts, positions, strict=True):
        assert abs(position - part.weight / total * step * size) < 2 + step * size / 1000, "the weights' resolution"
        first, end = end, end + part.end
        own = [[index - first for index in batch if first <= index < end] for batch in drawn]
        assert len(epoch := [*chain(*own)][: part.end]) < part.end or sorted(epoch) == list(range(part.end))
        alone = GlobalBatches((replace(part, position=position),), later_size, seed, first_step=step)
        later, expected = [each.source_index for each in alone.batch(step) + alone.batch(step + 1)], chain(*own[step:])
        assert all(one == other for one, other in zip(later, expected, strict=False))


def test_joined_samples_are_drawn_as_one():
    """A sequence takes samples in order while they fit, one that is too long alone; ids stay unique and in order."""
    starts = join_samples(np.array([3, 4, 5, 9, 1, 1, 1, 20, 2]), most=9)
    assert starts.tolist() == [0, 2, 3, 4, 7, 8, 9]
    batches = GlobalBatches((DataPart(6, starts=starts), DataPart(1, starts=np.array([0, 2]))), 7, seed=3)
    for step, first in ((0, 0), (1, 7)):
        drawn = batches.batch(step)
        ids = [sample.sample_id for sample in drawn]
        assert sorted(set(ids)) == ids and [number // MOST_JOINED for number in ids[:: len(ids) - 1]] == [first, first + 6]
    assert batches.positions(2) == (7, 7)
    alone = GlobalBatches((DataPart(6, starts=starts),), 6, seed=3)
    for step in range(3):
        assert sorted(sample.source_index for sample in alone.batch(step)) == list(range(9))
