"""Names of checkpoints: what is complete, what is newest, and what a crash between two renames leaves."""

from pathlib import Path

import pytest

from megatron.runtime.checkpoint.folder import (
    complete_partial,
    find_newest_checkpoint,
    list_checkpoints,
    open_partial,
    prune_checkpoints,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(folder: Path, *children: str) -> None:
    for name in children:
        (folder / name).mkdir(parents=True)


def test_nothing_is_found_where_nothing_is_complete(tmp_path: Path) -> None:
    assert find_newest_checkpoint(tmp_path / "nowhere") is None
    make(tmp_path, ".step_00000007.partial-host-1", ".step_00000006.removed-host-1", "step_7", "steps", "step_00000001.old")
    (tmp_path / "step_00000009").write_text("a file")
    assert find_newest_checkpoint(tmp_path) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    make(tmp_path, "step_99999999", "step_100000000", "step_00000002")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_99999999", "step_100000000"]


@pytest.mark.parametrize("num_operations", range(6))
def test_a_crash_at_any_rename_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_operations: int
) -> None:
    make(tmp_path, "step_00000004", "step_00000005")
    (tmp_path / "step_00000004" / "content").write_text("earlier")
    (tmp_path / "step_00000005" / "content").write_text("old")
    partial = open_partial(tmp_path, step=5)
    (partial / "content").write_text("new")
    with monkeypatch.context() as patch:
        renames = count_down(Path.rename, num_operations)
        patch.setattr(Path, "rename", renames)
        try:
            complete_partial(partial, step=5)
            is_done = True
        except KeyboardInterrupt:
            is_done = False
    newest = find_newest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest / "content").read_text() == ("old" if num_operations == 0 else "new")
    assert is_done == (num_operations >= 3)
    assert complete_partial(again := open_partial(tmp_path, step=5), step=5).name == "step_00000005"
    assert not again.exists()
    assert names(tmp_path) == ["step_00000004", "step_00000005"]


def count_down(original, num_operations):  # type: ignore[no-untyped-def]
    left = [num_operations]

    def call(*args):  # type: ignore[no-untyped-def]
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*args)

    return call


def test_pruning_leaves_the_steps_that_an_interval_divides(tmp_path: Path) -> None:
    make(tmp_path, *(f"step_{step:08d}" for step in (1, 2, 3, 4, 5)))
    prune_checkpoints(tmp_path, step=5, keep_last=1, retain_interval=2)
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000005"]


def test_pruning_counts_steps_up_to_the_saved_one(tmp_path: Path) -> None:
    make(tmp_path, *(f"step_{step:08d}" for step in (1, 2, 3, 9)))
    prune_checkpoints(tmp_path, step=3, keep_last=2)
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000009"]
