"""Where a run goes on after a change of phase: every data set where it was left, the rest as it was."""

from dataclasses import asdict
from typing import Any

import pytest

from megatron.runtime.feed.phase import Phase, find_phase
from multimodal.data.global_batches import DataPart, GlobalBatches

A, B, C = "aa 9,1 30", "bb 9,1 10", "cc 9,1 7"
"""Data sets of 30, 10 and 7 training samples."""


def describe(*data_sets: tuple[str, float], size: int = 8, **changed: Any) -> dict[str, Any]:
    run = {
        "global_batch_size": size,
        "data_sets": [list(each) for each in data_sets],
        "learning_rate": {"lr": 0.1},
        "trained": {},
    }
    return {**run, **changed}


def batches_of(run: dict[str, Any]) -> GlobalBatches:
    parts = tuple(DataPart(int(name.split()[-1]), weight) for name, weight in run["data_sets"])
    return GlobalBatches(parts, run["global_batch_size"], seed=5)


def test_nothing_changed_goes_on_as_it_was() -> None:
    run = describe((A, 1.0))
    for may_change in (False, True):
        assert find_phase(run, run, step=6, may_change=may_change) == Phase()
    assert Phase().go_on(batches_of(run), run) == batches_of(run)


def test_another_batch_size_goes_on_with_the_next_sample() -> None:
    before, now = describe((A, 1.0)), describe((A, 1.0), size=12)
    phase = find_phase(before, now, step=6, may_change=True)
    assert phase == Phase(6, 48, {A: 48})
    found = phase.go_on(batches_of(now), now).batch(6)
    following = batches_of(before).batch(6) + batches_of(before).batch(7)
    assert found == following[:12]


def test_a_data_set_comes_back_where_it_was_left_two_phases_later() -> None:
    first, second, third = describe((A, 0.75), (B, 0.25)), describe((C, 1.0), size=4), describe((B, 0.5), (C, 0.5))
    phase = find_phase(first, second, step=10, may_change=True)
    assert phase == Phase(10, 80, {A: 60, B: 20})
    phase = find_phase({**second, "phase": asdict(phase)}, third, step=13, may_change=True)
    assert phase == Phase(13, 92, {A: 60, B: 20, C: 12})
    assert [part.position for part in phase.go_on(batches_of(third), third).parts] == [20, 12]
    saved = {**third, "phase": asdict(phase)}
    assert find_phase(saved, third, step=20, may_change=True) == phase, "the same command again is no new phase"


@pytest.mark.parametrize("changed", [{"learning_rate": {"lr": 0.2}}, {"trained": {"frozen": ["vision"]}}])
def test_the_learning_rate_begins_anew_where_it_or_what_is_trained_changes(changed: dict[str, Any]) -> None:
    before = describe((A, 1.0))
    assert find_phase(before, {**before, **changed}, step=6, may_change=True) == Phase(learning_rate_first_step=6)
    assert find_phase(before, {**before, **changed}, step=6, may_change=False) == Phase()


def test_a_checkpoint_that_lists_no_data_sets_has_one() -> None:
    older = {"global_batch_size": 8, "data_digest": "aa", "split": "9,1", "num_train_samples": 30}
    now = describe((A, 1.0), size=4)
    assert find_phase(older, now, step=6, may_change=True) == Phase(6, 48, {A: 48})
