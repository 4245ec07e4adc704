"""Training, validation and test parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data.source_views import SourceSubset
from multimodal.data.splits import parse_split, split_indices
from multimodal.values.errors import DataError
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
