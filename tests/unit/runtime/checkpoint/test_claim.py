"""Who may write into a folder of checkpoints: a run that lives keeps others out, one that is gone keeps nobody out."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.runtime.checkpoint import claim as module
from megatron.runtime.checkpoint.claim import MARK_NAME, FolderClaim, Writer
from multimodal.values.errors import CheckpointError

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
    """Nobody waits long here."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(module, "_ENDING_SECONDS", 0.0)


def claim(folder: Path, environ: dict[str, str] | None = None) -> FolderClaim:
    return FolderClaim(folder, environ=environ or {})


def wait_for(has_happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not has_happened():
        assert time.monotonic() < deadline


def take(folder: Path, environ: dict[str, str] | None = None) -> None:
    """Take a folder at once, and release it."""
    second = claim(folder, environ)
    assert second.try_to_take()
    second.check()
    second.release()


def mark(folder: Path, writer: Writer) -> Path:
    """Leave a writer's mark."""
    path = folder / MARK_NAME
    path.write_text(json.dumps(asdict(writer)))
    return path


def elsewhere(writer: Writer) -> Writer:
    return replace(writer, machine="another boot", host="node7")


def test_a_free_folder_is_taken_and_released(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = claim(folder)
    assert first.try_to_take()
    first.check()
    assert [path.name for path in folder.iterdir()] == [MARK_NAME]
    first.release()
    assert list(folder.iterdir()) == []


def test_a_run_that_lives_keeps_others_out(tmp_path: Path, alive: Writer) -> None:
    path = mark(tmp_path, alive)
    with pytest.raises(CheckpointError) as problem:
        claim(tmp_path).try_to_take()
    message = str(problem.value)
    assert message.startswith(f"--save {tmp_path}: another run writes there (process {alive.process} on {alive.host}, started ")
    assert "give this run another --save" in message
    assert f"remove {path}" in message
    assert [path.name for path in tmp_path.iterdir()] == [MARK_NAME]


def test_a_run_that_is_ending_is_waited_for(tmp_path: Path, alive: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENDING_SECONDS", 60.0)
    mark(tmp_path, alive)
    second = claim(tmp_path)
    assert not second.try_to_take()
    os.kill(alive.process, 9)
    wait_for(second.try_to_take)
    second.check()
    second.release()


@pytest.mark.parametrize("change", [{"process": 2**22 + 1}, {"process_start": "1"}])
def test_a_process_that_is_gone_keeps_nobody_out(tmp_path: Path, alive: Writer, change: dict[str, object]) -> None:
    mark(tmp_path, replace(alive, **change))  # type: ignore[arg-type]
    take(tmp_path)


def test_a_later_attempt_of_the_same_job_takes_over(tmp_path: Path, alive: Writer) -> None:
    mark(tmp_path, elsewhere(replace(alive, job="Slurm 71", attempt=(0, 0))))
    assert not claim(tmp_path, {"SLURM_JOB_ID": "72", "SLURM_RESTART_COUNT": "1"}).try_to_take()
    assert not claim(tmp_path, SLURM).try_to_take()
    take(tmp_path, SLURM | {"SLURM_RESTART_COUNT": "1"})


def test_silence_of_another_machine_is_waited_for(tmp_path: Path, alive: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(tmp_path, elsewhere(alive))
    assert not claim(tmp_path).try_to_take()
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.05)
    second = claim(tmp_path)
    wait_for(second.try_to_take)
    second.release()


def test_an_old_mark_of_another_machine_is_taken_at_once(tmp_path: Path, alive: Writer) -> None:
    os.utime(mark(tmp_path, elsewhere(alive)), (0, 0))
    take(tmp_path)


def test_a_sign_of_life_of_another_machine_keeps_out(tmp_path: Path, alive: Writer) -> None:
    path = mark(tmp_path, elsewhere(alive))
    second = claim(tmp_path)
    assert not second.try_to_take()
    os.utime(path, (time.time() + 1, time.time() + 1))
    with pytest.raises(CheckpointError, match="another run writes there"):
        second.try_to_take()


def test_signs_of_life_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOUCH_SECONDS", 0.005)
    first = claim(tmp_path)
    assert first.try_to_take()
    path = tmp_path / MARK_NAME
    os.utime(path, (0, 0))
    wait_for(lambda: path.stat().st_mtime > 0)
    first.release()


def test_who_lost_the_folder_hears_it(tmp_path: Path, alive: Writer) -> None:
    first = claim(tmp_path)
    assert first.try_to_take()
    path = mark(tmp_path, elsewhere(alive))
    with pytest.raises(CheckpointError, match=r"another run writes there \(process \d+ on node7"):
        first.check()
    first.release()
    assert path.exists(), "the mark of the other run was removed"


def test_a_mark_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    first = claim(tmp_path)
    assert first.try_to_take()
    (tmp_path / MARK_NAME).unlink()
    first.check()
    assert (tmp_path / MARK_NAME).exists()
    first.release()


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b"{}", b'{"attempt": 3}', b"[" * 100_000])
def test_a_mark_that_cannot_be_read_counts_until_it_is_old(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / MARK_NAME
    path.write_bytes(content)
    assert not claim(tmp_path).try_to_take()
    os.utime(path, (0, 0))
    take(tmp_path)


def test_a_process_takes_its_own_folder_again(tmp_path: Path) -> None:
    assert claim(tmp_path).try_to_take()
    take(tmp_path)
