"""`braid.json`: what a checkpoint is of, and the files that belong to it with their sizes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint_folder import find_newest_checkpoint, list_checkpoints
from multimodal.values.errors import CheckpointError, ModelError
from multimodal.values.model_graph import ModelGraph

FORMAT_VERSION = 1
_FILE_NAME = "braid.json"
_CHANGEABLE = {"freeze_module", "freeze_projector", "init_method_std", "min_pixels", "max_pixels"}
"""What may differ between a checkpoint's model and the run's: it changes neither a weight's shape nor its meaning."""


@dataclass(frozen=True)
class Manifest:
    """Plain values only."""

    step: int
    dtype: str
    model: dict[str, Any]
    plan: dict[str, Any]
    """For the reader's information; a checkpoint loads under any plan."""
    run_state: dict[str, Any]
    schedulers_state: dict[str, Any]
    random_state: dict[str, Any]
    files: dict[str, int]
    """File name -> bytes."""
    format_version: int = FORMAT_VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, after checking that the files of all ranks are there; raises CheckpointError or OSError."""
    for name, size_bytes in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size_bytes:
            raise CheckpointError(
                f"{folder}: another rank wrote {name} with {size_bytes} bytes, but rank 0 does not see it like that; "
                "save into a folder that all nodes share"
            )
    with open(folder / _FILE_NAME, "w") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())


def read_newest(folder: Path) -> tuple[Path, Manifest]:
    """The newest complete checkpoint in `folder` and its manifest; raises CheckpointError when there is none or it is damaged."""
    path = find_newest_checkpoint(folder)
    if path is None:
        found = "no such folder" if not folder.exists() else "no complete checkpoint there (no folder step_<number>)"
        raise CheckpointError(f"{folder}: {found}; correct --load, or leave it out to start anew")
    manifest = _read(path)
    for name, size_bytes in manifest.files.items():
        file = path / name
        found = f"{name} has {file.stat().st_size} bytes instead of {size_bytes}" if file.is_file() else f"{name} is missing"
        if not file.is_file() or file.stat().st_size != size_bytes:
            raise CheckpointError(f"{path} is damaged: {found}; {_way_out(path)}")
    return path, manifest


def check_model(path: Path, manifest: Manifest, *, graph: ModelGraph) -> None:
    """Raise CheckpointError with the first difference when the checkpoint is of another model than `graph`."""
    try:
        saved = ModelGraph.from_dict(manifest.model)
    except ModelError as problem:
        raise CheckpointError(f"{path}: its model cannot be read ({problem}); load it with the Braid that wrote it") from problem
    if difference := _first_difference(saved.to_dict(), graph.to_dict(), where="model"):
        raise CheckpointError(
            f"{path} is of another model: {difference}; pass the model file that it was trained with, or another folder to --load"
        )


def check_dtype(path: Path, manifest: Manifest, *, dtype: str) -> None:
    """Raise CheckpointError when optimizer state would be loaded into a run of another precision."""
    if manifest.dtype != dtype:
        raise CheckpointError(
            f"{path} was saved by a {manifest.dtype} run and this is a {dtype} run, whose optimizer keeps other numbers; "
            f"resume with the flags of {manifest.dtype}, or pass --no-load-optim to take over the weights alone"
        )


def _read(path: Path) -> Manifest:
    try:
        value = json.loads((path / _FILE_NAME).read_text())
        version = value["format_version"]
        if version == FORMAT_VERSION:
            return Manifest(**value)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path} is damaged: {_FILE_NAME} cannot be read ({problem}); {_way_out(path)}") from problem
    raise CheckpointError(f"{path} has format {version}, expected {FORMAT_VERSION}; load it with the Braid that wrote it")


def _way_out(path: Path) -> str:
    earlier = [other for other in list_checkpoints(path.parent) if other.name < path.name]
    if not earlier:
        return "it is the only one there; restore it from a copy, or start anew without --load"
    return f"move {path} away, and the one before it, {earlier[-1]}, is loaded"


def _first_difference(saved: Any, current: Any, *, where: str) -> str | None:
    if not isinstance(saved, Mapping) or not isinstance(current, Mapping):
        return None if saved == current else f"{where} is {saved} in the checkpoint and {current} in this run"
    for key in [*saved, *(key for key in current if key not in saved)]:
        if key in _CHANGEABLE:
            continue
        if key not in current or key not in saved:
            return f"{where}.{key} is only in {'the checkpoint' if key in saved else 'this run'}"
        if difference := _first_difference(saved[key], current[key], where=f"{where}.{key}"):
            return difference
    return None
