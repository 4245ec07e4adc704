"""The folder of a run's checkpoints: a checkpoint is complete if and only if it carries its final name.

    step_00000040                       complete
    step_00000050                       complete
    step_00000050.new                   complete, too: the same step saved again, about to take the other's place
    .step_00000060.partial-HOST-PID     being written, or left by a save that died
    .step_00000030.removed-HOST-PID     being removed

Names change only by renaming, which is atomic, and a removed folder is first renamed to a hidden name. So whenever a process
dies, every complete checkpoint is whole.
"""

import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from multimodal.values.errors import CheckpointError

_COMPLETE = re.compile(r"step_(\d{8,})(\.new)?")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?:partial|removed)-(?P<host>.+)-(?P<process>\d+)")
_STALE_SECONDS = 3600.0
"""Unfinished saves of another host count as dead if nothing in them has changed for this long."""


class _Complete(NamedTuple):
    step: int
    is_replacement: bool
    """`step_N.new`, which is newer than `step_N`."""
    path: Path


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`, or `folder` itself if it is one; None if there is none."""
    complete = list_checkpoints(folder)
    return complete[-1] if complete else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all complete checkpoints, oldest step first; for a folder that is itself a checkpoint, only that one."""
    if _COMPLETE.fullmatch(folder.name) and (folder / "braid.json").exists():
        return [folder]
    return [entry.path for entry in _list_complete(folder)]


def step_of(checkpoint: Path) -> int:
    """Return the step in a complete checkpoint's name."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not the name of a complete checkpoint"
    return int(match[1])


def folder_of_run(path: Path) -> Path:
    """Return the folder for a path given to --load: that of the run if the path is a checkpoint, else the path itself."""
    return path.parent if _COMPLETE.fullmatch(path.name) else path


def damaged(checkpoint: Path, found: str) -> CheckpointError:
    """Return the error for a checkpoint that differs from what was saved; found: names the file and what is wrong with it."""
    earlier = [other for other in list_checkpoints(checkpoint.parent) if step_of(other) < step_of(checkpoint)]
    way_out = "it is the only one there; restore it from a copy, or start anew without --load"
    if earlier:
        way_out = f"move {checkpoint} away, and the one before it, {earlier[-1]}, is loaded"
    return CheckpointError(f"{checkpoint} is damaged: {found}; {way_out}")


def open_partial(folder: Path, *, step: int) -> Path:
    """Make the folder that a save writes into, after removing the remains of dead saves; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in _list_complete(folder):
        if entry.is_replacement:
            _settle_replacement(entry.path, final=folder / _name(entry.step))
    remove_dead_folders(folder, name=r"step_\d{8,}")
    partial = hidden_folder(folder / _name(step), "partial")
    partial.mkdir()
    return partial


def hidden_folder(folder: Path, state: str) -> Path:
    """Return the hidden path of this process for something being made or removed; state: `partial` or `removed`."""
    return folder.parent / f".{folder.name}.{state}-{socket.gethostname()}-{os.getpid()}"


def remove_dead_folders(folder: Path, *, name: str) -> None:
    """Remove the unfinished results of dead processes in a folder; name: a pattern of the intended names."""
    for path in folder.iterdir():
        match = _HIDDEN.fullmatch(path.name)
        if not match or not re.fullmatch(name, match["name"]):
            continue
        process = int(match["process"])
        if match["host"] == socket.gethostname():
            is_dead = process == os.getpid() or not is_alive(process)
        else:
            is_dead = time.time() - max(entry.stat().st_mtime for entry in (path, *path.iterdir())) > _STALE_SECONDS
        if is_dead:
            shutil.rmtree(path, ignore_errors=True)


def complete_partial(partial: Path, *, step: int) -> Path:
    """Give a finished save its final name, replacing an older save of the same step; raises OSError."""
    folder, name = partial.parent, _name(step)
    sync_folder(partial)
    if (folder / name).exists():
        replacement = partial.rename(folder / f"{name}.new")
        sync_folder(folder)
        _settle_replacement(replacement, final=folder / name)
    else:
        partial.rename(folder / name)
    sync_folder(folder)
    return folder / name


def prune_checkpoints(folder: Path, *, step: int, keep_last: int, retain_interval: int | None = None) -> None:
    """Remove all up to `step` but the last `keep_last` and those that `retain_interval` divides; later ones are not ours."""
    past = [entry for entry in _list_complete(folder) if entry.step <= step]
    for entry in past[: max(0, len(past) - keep_last)]:
        if retain_interval is None or entry.step % retain_interval:
            remove_checkpoint(entry.path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint or partial folder so that it is never visible half removed; raises OSError if it cannot be renamed."""
    hidden = hidden_folder(path.with_name(path.name.removesuffix(".new").lstrip(".").split(".")[0]), "removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _settle_replacement(replacement: Path, *, final: Path) -> None:
    if final.exists():
        remove_checkpoint(final)
    replacement.rename(final)


def _list_complete(folder: Path) -> list[_Complete]:
    if not folder.is_dir():
        return []
    matches = [(path, _COMPLETE.fullmatch(path.name)) for path in folder.iterdir()]
    return sorted(_Complete(int(match[1]), bool(match[2]), path) for path, match in matches if match and path.is_dir())


def _name(step: int) -> str:
    return f"step_{step:08d}"


def is_alive(process: int) -> bool:
    """Return True if this machine has a process with this number."""
    with suppress(PermissionError):  # somebody else's
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True


def sync_file(file: IO[Any]) -> None:
    """Make sure that what was written to a file is on the disk; raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on the disk; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
