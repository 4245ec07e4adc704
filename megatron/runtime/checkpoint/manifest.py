"""`braid.json`: the origin of a checkpoint, its files, and checksums that bind them to each other."""

import base64
import json
import random
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import torch
from torch import Tensor

from megatron.runtime.checkpoint.folder import damaged, find_newest_checkpoint, step_of, sync_file
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph

FORMAT_VERSION = 2
MANIFEST_NAME = "braid.json"
_CHECKSUM = "crc32"
"""Key of the checksum over the rest of the file."""
_LAST_STEP = 10**15
_CHANGEABLE = {"freeze_module", "freeze_projector", "init_method_std", "min_pixels", "max_pixels", "weights", "directory"}
_CHANGEABLE |= {"is_cached", "operations", "num_weights", "kept_values"}
"""Fields in which a checkpoint's model and the run's may differ, because they change neither a weight's shape nor its meaning.
Folders may have been moved."""


@dataclass(frozen=True)
class Manifest:
    """The content of the file: only plain values."""

    step: int
    dtype: str
    model: dict[str, Any]
    plan: dict[str, Any]
    """The plan, for information; a checkpoint can be loaded under any plan."""
    run_state: dict[str, Any]
    schedulers_state: dict[str, Any]
    random_state: dict[str, Any]
    files: dict[str, int]
    """File name -> bytes."""
    index_crc32: int
    """The checksum of `tensors.json`, which has the checksums of all values."""
    format_version: int = FORMAT_VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the file after checking that the files of all ranks are there; raises CheckpointError or OSError."""
    for name, size_bytes in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size_bytes:
            raise CheckpointError(
                f"{folder}: another rank wrote {name} with {size_bytes} bytes, but rank 0 does not see it like that; "
                "save into a folder that all nodes share"
            )
    plain = asdict(manifest)
    with open(folder / MANIFEST_NAME, "w") as file:
        json.dump({**plain, _CHECKSUM: _checksum(plain)}, file)
        sync_file(file)


def read_newest(folder: Path) -> tuple[Path, Manifest]:
    """Return the newest complete checkpoint in `folder` and its manifest; raises CheckpointError if none or damaged."""
    path = find_newest_checkpoint(folder)
    if path is None:
        found = "no such folder" if not folder.exists() else "no complete checkpoint there (no folder step_<number>)"
        raise CheckpointError(f"{folder}: {found}; correct --load, or leave it out to start anew")
    manifest = _read(path)
    for name, size_bytes in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise damaged(path, f"{name} is missing")
        if file.stat().st_size != size_bytes:
            raise damaged(path, f"{name} has {file.stat().st_size} bytes instead of {size_bytes}")
    return path, manifest


def check_model(path: Path, manifest: Manifest, *, graph: ModelGraph, dtype: str | None = None) -> None:
    """Raise CheckpointError with the first difference from the run's model, or dtype if its optimizer's state is to be loaded."""
    try:
        saved = ModelGraph.from_dict(manifest.model)
    except Exception as problem:  # the content may be anything
        raise CheckpointError(f"{path}: its model cannot be read ({problem}); load it with the Braid that wrote it") from problem
    before, now = saved.to_dict(), graph.to_dict()
    for name, unit in now["units"].items():
        for key in {"lora", "new_tokens"} - before["units"].get(name, {}).keys():
            unit.pop(key, None)  # adapters that it lacks keep their initial values
    if difference := _first_difference(before, now, where="model"):
        raise CheckpointError(
            f"{path} is of another model: {difference}; pass the model file that it was trained with, or another folder to --load"
        )
    if dtype not in (None, manifest.dtype):
        raise CheckpointError(
            f"{path}: it was trained with --dtype {manifest.dtype}, this run has {dtype}, whose optimizer keeps other numbers; "
            f"use --dtype {manifest.dtype}, or take over the weights alone with --no-load-optim"
        )


def _read(path: Path) -> Manifest:
    if not (path / MANIFEST_NAME).is_file():
        raise damaged(path, f"{MANIFEST_NAME} is missing")
    try:
        value = json.loads((path / MANIFEST_NAME).read_bytes())
        version = value.get("format_version") if type(value) is dict else None
        if type(version) is not int:
            raise ValueError("it is no JSON object with a format_version")
        if version != FORMAT_VERSION:
            reason = ", whose files hold Python objects that could run commands and are not read any more" if version == 1 else ""
            raise CheckpointError(
                f"{path} has format {version}{reason}; this Braid reads format {FORMAT_VERSION}: train on with the Braid that "
                "wrote it, or give another folder to --load"
            )
        if value.pop(_CHECKSUM, None) != _checksum(value):
            raise ValueError("its checksum differs: it was changed after it was saved")
        kinds: dict[str, Any] = {field.name: get_origin(field.type) or field.type for field in fields(Manifest)}
        if odd := sorted(kinds.keys() ^ value.keys()):
            raise ValueError(f"{odd[0]!r} {'is missing' if odd[0] in kinds else 'is not known'}")
        for name, kind in kinds.items():
            if type(value[name]) is not kind:
                raise ValueError(f"{name} must be a {kind.__name__}, found {type(value[name]).__name__}")
        if not 0 <= value["step"] <= _LAST_STEP:
            raise ValueError(f"step must be from 0 to {_LAST_STEP}, found {value['step']}")
        for name, size_bytes in value["files"].items():
            if Path(name).name != name or type(size_bytes) is not int or size_bytes < 0:
                raise ValueError(f"files must be names without folders and numbers of bytes, found {name!r}: {size_bytes!r}")
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise damaged(path, f"{MANIFEST_NAME} cannot be used ({problem})") from problem
    manifest = Manifest(**value)
    if manifest.step != step_of(path):
        raise damaged(path, f"{MANIFEST_NAME} is of step {manifest.step}, which the folder's name does not say")
    return manifest


def _checksum(value: Mapping[str, Any]) -> int:
    """Return the checksum of the content, independent of its layout."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


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


def capture_random_state() -> dict[str, Any]:
    """Return the state of this process's generators, including CUDA's if there is one."""
    version, values, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(values), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    return {**state, "cuda": _encode(torch.cuda.get_rng_state())} if torch.cuda.is_available() else state


def restore_random_state(path: Path, state: dict[str, Any]) -> None:
    """Set the generators to a result of `capture_random_state`, CUDA's if both have it; raises CheckpointError if it is none."""
    try:
        version, values, gauss = state["python"]
        random.setstate((version, tuple(values), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(_decode(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(state["cuda"]))
    except Exception as problem:  # the content may be anything
        raise damaged(path, f"its random_state cannot be restored ({problem})") from problem


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
