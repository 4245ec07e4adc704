"""Batches as a pure function of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data.global_batches import GlobalBatches
from multimodal.values.errors import ConfigError, DataError


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**40), st.booleans())
def test_epochs_visit_every_sample_once(num_samples: int, global_batch_size: int, seed: int, shuffle: bool) -> None:
    """Across batch borders, with sample ids that count on."""
    batches = GlobalBatches(num_samples, global_batch_size, seed, shuffle)
    num_steps = -(-3 * num_samples // global_batch_size)
    drawn = [sample for step in range(num_steps) for sample in batches.batch(step)]
    assert [sample.sample_id for sample in drawn] == list(range(num_steps * global_batch_size))
    for epoch in range(3):
        visited = [sample.source_index for sample in drawn[epoch * num_samples : (epoch + 1) * num_samples]]
        assert sorted(visited) == list(range(num_samples))
        assert shuffle or visited == list(range(num_samples))


def test_any_step_can_be_asked_first() -> None:
    """Resuming needs no replay."""
    ahead = GlobalBatches(50, 8, seed=3)
    in_order = [GlobalBatches(50, 8, seed=3).batch(step) for step in range(20)]
    assert [ahead.batch(step) for step in reversed(range(20))] == in_order[::-1]


def test_seed_and_epoch_change_the_order() -> None:
    """Neither repeats the other's order."""
    orders = [
        tuple(sample.source_index for sample in GlobalBatches(100, 100, seed=seed).batch(epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_the_order_is_the_same_everywhere() -> None:
    """Pinned: another order would break the resumption of existing runs."""
    found = [sample.source_index for sample in GlobalBatches(8, 8, seed=1234).batch(1)]
    assert found == [0, 5, 7, 3, 6, 4, 2, 1]


def test_nothing_to_draw() -> None:
    """No samples, no batch size."""
    with pytest.raises(DataError, match="0 samples"):
        GlobalBatches(0, 4, seed=1)
    with pytest.raises(ConfigError, match="--global-batch-size is 0"):
        GlobalBatches(4, 0, seed=1)
