"""Batches as a pure function of the step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.values.errors import ConfigError, DataError


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**40), st.booleans(), st.integers(1, 50))
def test_epochs_visit_every_sample_once(
    num_samples: int, global_batch_size: int, seed: int, shuffle: bool, block_size: int
) -> None:
    """Across the borders of batches and blocks, with sample ids that count on."""
    batches = GlobalBatches((DataPart(num_samples),), global_batch_size, seed, shuffle, block_size=block_size)
    num_steps = -(-3 * num_samples // global_batch_size)
    drawn = [sample for step in range(num_steps) for sample in batches.batch(step)]
    assert [sample.sample_id for sample in drawn] == list(range(num_steps * global_batch_size))
    for epoch in range(3):
        visited = [sample.source_index for sample in drawn[epoch * num_samples : (epoch + 1) * num_samples]]
        assert sorted(visited) == list(range(num_samples))
        assert shuffle or visited == list(range(num_samples))


def test_any_step_can_be_asked_first() -> None:
    """Resuming needs no replay."""
    ahead = GlobalBatches((DataPart(50),), 8, seed=3)
    in_order = [GlobalBatches((DataPart(50),), 8, seed=3).batch(step) for step in range(20)]
    assert [ahead.batch(step) for step in reversed(range(20))] == in_order[::-1]


def test_seed_and_epoch_change_the_order() -> None:
    """Neither repeats the other's order."""
    orders = [
        tuple(sample.source_index for sample in GlobalBatches((DataPart(100),), 100, seed=seed).batch(epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_the_order_is_the_same_everywhere() -> None:
    """Pinned: another order would break the resumption of existing runs."""
    found = [sample.source_index for sample in GlobalBatches((DataPart(8),), 8, seed=1234).batch(1)]
    assert found == [0, 5, 7, 3, 6, 4, 2, 1]


def test_a_thousand_million_samples_are_shuffled_by_blocks() -> None:
    """In memory is the order of one block and that of the blocks, whose samples follow each other at random."""
    batches = GlobalBatches((DataPart(10**9),), 2**10, seed=1)
    drawn = [[sample.source_index for sample in batches.batch(step)] for step in (0, 1023, 1024)]
    blocks = [{index // 2**20 for index in found} for found in drawn]
    assert blocks[0] == blocks[1] != blocks[2] and list(map(len, blocks)) == [1, 1, 1]
    assert len({index for found in drawn for index in found}) == 3 * 2**10 and drawn[0] != sorted(drawn[0])


def test_nothing_to_draw() -> None:
    """No samples, no batch size."""
    with pytest.raises(DataError, match="0 samples"):
        GlobalBatches((DataPart(0),), 4, seed=1)
    with pytest.raises(ConfigError, match="--global-batch-size is 0"):
        GlobalBatches((DataPart(4),), 0, seed=1)


MIXTURE = (DataPart(30, 0.7), DataPart(10, 0.2), DataPart(7, 0.1))


def owners(batches: GlobalBatches, steps: range) -> list[int]:
    """Return the data set of each sample drawn."""
    return [int(sample.source_index >= 30) + int(sample.source_index >= 40) for step in steps for sample in batches.batch(step)]


def test_data_sets_take_turns_by_their_weights() -> None:
    """At any moment each is within one or two samples of its share, and goes through its own epochs."""
    batches = GlobalBatches(MIXTURE, 8, seed=3)
    drawn = owners(batches, range(25))
    for count in range(1, len(drawn) + 1):
        for number, part in enumerate(MIXTURE):
            assert abs(drawn[:count].count(number) - part.weight * count) < 2
    visited = [sample.source_index for step in range(25) for sample in batches.batch(step) if 30 <= sample.source_index < 40]
    assert sorted(visited[:10]) == sorted(visited[10:20]) == list(range(30, 40))


def test_positions_count_what_was_drawn() -> None:
    batches = GlobalBatches(MIXTURE, 8, seed=3)
    for step in (0, 1, 7, 25):
        drawn = owners(batches, range(step))
        assert batches.positions(step) == tuple(drawn.count(number) for number in range(3))


def test_a_data_set_goes_on_where_it_was_left_whatever_is_beside_it() -> None:
    before, step = GlobalBatches(MIXTURE, 8, seed=3), 6
    positions = before.positions(step)
    alone = GlobalBatches((DataPart(10, position=positions[1]),), 5, seed=3, first_step=step, first_sample=48)
    whole = [sample.source_index - 30 for at in range(60) for sample in before.batch(at) if 30 <= sample.source_index < 40]
    found = [sample for at in range(step, step + 8) for sample in alone.batch(at)]
    assert [sample.source_index for sample in found] == whole[positions[1] : positions[1] + 40]
    assert [sample.sample_id for sample in found] == list(range(48, 88))
