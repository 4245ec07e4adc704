"""Folders of checkpoints: what is complete and what is newest, what a crash between two renames leaves, and who may write."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from megatron.runtime.checkpoint import claim as module
from megatron.runtime.checkpoint.claim import MARK_NAME, FolderClaim, Writer
from megatron.runtime.checkpoint.folder import (
    complete_partial,
    find_newest_checkpoint,
    list_checkpoints,
    open_partial,
    prune_checkpoints,
)
from megatron.runtime.launch.meeting import wait_until
from multimodal.values.errors import CheckpointError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(folder: Path, *children: str) -> None:
    for name in children:
        (folder / name).mkdir(parents=True)


def test_nothing_is_found_where_nothing_is_complete(tmp_path):
    assert find_newest_checkpoint(tmp_path / "nowhere") is None
    make(tmp_path, ".step_00000007.partial-host-1", ".step_00000006.removed-host-1", "step_7", "steps", "step_00000001.old")
    (tmp_path / "step_00000009").write_text("a file")
    assert find_newest_checkpoint(tmp_path) is None


def test_steps_are_ordered_as_numbers(tmp_path):
    make(tmp_path, "step_99999999", "step_100000000", "step_00000002")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000002", "step_99999999", "step_100000000"]


@pytest.mark.parametrize("num_operations", range(6))
def test_a_crash_at_any_rename_leaves_the_old_or_the_new(tmp_path, monkeypatch, num_operations):
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


def test_pruning_leaves_the_steps_that_an_interval_divides(tmp_path):
    make(tmp_path, *(f"step_{step:08d}" for step in (1, 2, 3, 4, 5)))
    prune_checkpoints(tmp_path, step=5, keep_last=1, retain_interval=2)
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000005"]


def test_pruning_counts_steps_up_to_the_saved_one(tmp_path):
    make(tmp_path, *(f"step_{step:08d}" for step in (1, 2, 3, 9)))
    prune_checkpoints(tmp_path, step=3, keep_last=2)
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000009"]


SLURM = {"SLURM_JOB_ID": "71"}


@pytest.fixture
def alive() -> Iterator[Writer]:
    """A writer of this machine whose process runs."""
    process = subprocess.Popen(["sleep", "60"])
    start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield replace(Writer.of_this_process({}), process=process.pid, process_start=start)
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(module, "_ENDING_SECONDS", 0.0)


def claim(folder: Path, environ: dict[str, str] | None = None) -> FolderClaim:
    return FolderClaim(folder, environ=environ or {})


def take(folder: Path, environ: dict[str, str] | None = None) -> None:
    second = claim(folder, environ)
    assert second.try_to_take()
    second.check()
    second.release()


def mark(folder: Path, writer: Writer) -> Path:
    path = folder / MARK_NAME
    path.write_text(json.dumps(asdict(writer)))
    return path


def elsewhere(writer: Writer) -> Writer:
    return replace(writer, machine="another boot", host="node7")


def test_a_free_folder_is_taken_and_released(tmp_path):
    folder = tmp_path / "new" / "folder"
    first = claim(folder)
    assert first.try_to_take()
    first.check()
    assert [path.name for path in folder.iterdir()] == [MARK_NAME]
    first.release()
    assert list(folder.iterdir()) == []


def test_a_run_that_lives_keeps_others_out(tmp_path, alive):
    path = mark(tmp_path, alive)
    with pytest.raises(CheckpointError) as problem:
        claim(tmp_path).try_to_take()
    message = str(problem.value)
    assert message.startswith(f"--save {tmp_path}: another run writes there (process {alive.process} on {alive.host}, started ")
    assert "give this run another --save" in message
    assert f"remove {path}" in message
    assert [path.name for path in tmp_path.iterdir()] == [MARK_NAME]


def test_a_run_that_is_ending_is_waited_for(tmp_path, alive, monkeypatch):
    monkeypatch.setattr(module, "_ENDING_SECONDS", 60.0)
    mark(tmp_path, alive)
    second = claim(tmp_path)
    assert not second.try_to_take()
    os.kill(alive.process, 9)
    assert wait_until(second.try_to_take, seconds=30, pause_seconds=0.001)
    second.check()
    second.release()


@pytest.mark.parametrize("change", [{"process": 2**22 + 1}, {"process_start": "1"}])
def test_a_process_that_is_gone_keeps_nobody_out(tmp_path, alive, change):
    mark(tmp_path, replace(alive, **change))  # type: ignore[arg-type]
    take(tmp_path)


def test_a_later_attempt_of_the_same_job_takes_over(tmp_path, alive):
    mark(tmp_path, elsewhere(replace(alive, job="Slurm 71", attempt=(0, 0))))
    assert not claim(tmp_path, {"SLURM_JOB_ID": "72", "SLURM_RESTART_COUNT": "1"}).try_to_take()
    assert not claim(tmp_path, SLURM).try_to_take()
    take(tmp_path, SLURM | {"SLURM_RESTART_COUNT": "1"})


def test_silence_of_another_machine_is_waited_for(tmp_path, alive, monkeypatch):
    mark(tmp_path, elsewhere(alive))
    assert not claim(tmp_path).try_to_take()
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.05)
    second = claim(tmp_path)
    assert wait_until(second.try_to_take, seconds=30, pause_seconds=0.001)
    second.release()


def test_an_old_mark_of_another_machine_is_taken_at_once(tmp_path, alive):
    os.utime(mark(tmp_path, elsewhere(alive)), (0, 0))
    take(tmp_path)


def test_a_sign_of_life_of_another_machine_keeps_out(tmp_path, alive):
    path = mark(tmp_path, elsewhere(alive))
    second = claim(tmp_path)
    assert not second.try_to_take()
    os.utime(path, (time.time() + 1, time.time() + 1))
    with pytest.raises(CheckpointError, match="another run writes there"):
        second.try_to_take()


def test_signs_of_life_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TOUCH_SECONDS", 0.005)
    first = claim(tmp_path)
    assert first.try_to_take()
    path = tmp_path / MARK_NAME
    os.utime(path, (0, 0))
    assert wait_until(lambda: path.stat().st_mtime > 0, seconds=30, pause_seconds=0.001)
    first.release()


def test_who_lost_the_folder_hears_it(tmp_path, alive):
    first = claim(tmp_path)
    assert first.try_to_take()
    path = mark(tmp_path, elsewhere(alive))
    with pytest.raises(CheckpointError, match=r"another run writes there \(process \d+ on node7"):
        first.check()
    first.release()
    assert path.exists(), "the mark of the other run was removed"


def test_a_mark_or_folder_that_somebody_removed_is_made_again(tmp_path):
    first = claim(tmp_path / "save")
    assert first.try_to_take()
    for remove in ((tmp_path / "save" / MARK_NAME).unlink, partial(shutil.rmtree, tmp_path / "save")):
        remove()
        first.check()
        assert (tmp_path / "save" / MARK_NAME).exists()
    first.release()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b"{}", b'{"attempt": 3}', b"[" * 100_000])
def test_a_mark_that_cannot_be_read_counts_until_it_is_old(tmp_path, content):
    path = tmp_path / MARK_NAME
    path.write_bytes(content)
    assert not claim(tmp_path).try_to_take()
    os.utime(path, (0, 0))
    take(tmp_path)


def test_a_process_takes_its_own_folder_again(tmp_path):
    assert claim(tmp_path).try_to_take()
    take(tmp_path)
