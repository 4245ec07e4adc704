"""Reads the safetensors files of a Hugging Face folder, as a whole or in parts."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.values.errors import CheckpointError, ModelError, require_package
from multimodal.values.file_form import read_mapping

SINGLE_NAME = "model.safetensors"
DIFFUSERS_NAME = "diffusion_pytorch_model.safetensors"
"""The file of a module of diffusers."""
INDEX_ENDING = ".index.json"
"""Behind the name that one file would have: says which tensor is in which of several files."""
INDEX_NAME = SINGLE_NAME + INDEX_ENDING
_INDEX_NAMES = (INDEX_NAME, DIFFUSERS_NAME + INDEX_ENDING)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


class SavedWeight(NamedTuple):
    """One tensor of a folder."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def num_rows(self, row_size: int) -> int:
        """Return its number of rows as a matrix; leading dimensions of one do not count."""
        first, size = (self.shape[0] if self.shape else 1), math.prod(self.shape)
        return size // row_size if first == 1 and size % row_size == 0 else first


class WeightFiles:
    """All tensors of a folder, read in parts; closes its files at the end of a `with`."""

    weights: Mapping[str, SavedWeight]
    """Tensors by their name in the files."""
    folder: Path
    metadata: Mapping[str, Mapping[str, str]]
    """Entries of a file's header besides tensors, by file."""

    def __init__(self, folder: Path, *, single: str = SINGLE_NAME) -> None:
        """Read all headers; raises CheckpointError if a file is missing or damaged, or contains unsupported types.

        single: the name of the file if there is no index.
        """
        require_package("safetensors", extra="hf", needed_by="--load-hf", error=CheckpointError)
        from safetensors import SafetensorError, safe_open

        self.folder, self._files = folder, ExitStack()
        self._open: dict[str, Any] = {}
        weights: dict[str, SavedWeight] = {}
        metadata: dict[str, Mapping[str, str]] = {}
        for name, keys in _list_files(folder, single=single).items():
            try:
                self._open[name] = file = self._files.enter_context(safe_open(str(folder / name), framework="pt"))
            except FileNotFoundError as problem:
                raise CheckpointError(
                    f"{folder / name}: no such file, though the index names it; copy the whole folder"
                ) from problem
            except (SafetensorError, OSError) as problem:
                raise CheckpointError(f"{folder / name}: cannot be read ({problem}); copy the file again") from problem
            metadata[name] = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118  # the file is no mapping
                part = file.get_slice(key)
                if part.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{self.folder / name}: {key} is of type {part.get_dtype()}, expected one of {', '.join(DTYPES)}; take "
                        "the model whose weights are not quantised"
                    )
                weights[key] = SavedWeight(name, DTYPES[part.get_dtype()], tuple(part.get_shape()))
            if missing := sorted(keys - set(file.keys())):
                raise CheckpointError(
                    f"{folder / name}: {missing[0]} is missing, which the index says is there; copy the folder again"
                )
        self.weights, self.metadata = weights, metadata

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read(self, key: str, rows: range, columns: range, *, row_size: int) -> Tensor:
        """Return [len(rows), len(columns)] of a tensor as a matrix; row_size: its columns as a matrix."""
        part = self._open[self.weights[key].file].get_slice(key)
        shape = self.weights[key].shape
        if len(shape) == 1:
            return part[rows.start : rows.stop][:, None]
        if len(shape) == 2:
            return part[rows.start : rows.stop, columns.start : columns.stop]
        if shape[0] == 1:
            values: Tensor = part[:].reshape(-1, row_size)[rows.start : rows.stop]
        else:
            values = part[rows.start : rows.stop].reshape(len(rows), row_size)
        return values[:, columns.start : columns.stop]

    def read_whole(self, key: str) -> Tensor:
        """Return a tensor."""
        return self._open[self.weights[key].file].get_tensor(key)


def _list_files(folder: Path, *, single: str) -> dict[str, set[str]]:
    """List the files with weights, and the tensors of each according to the index."""
    for name in (single, DIFFUSERS_NAME):
        if (folder / name).is_file():
            return {name: set()}
    index_name = next((name for name in _INDEX_NAMES if (folder / name).is_file()), None)
    if index_name is None:
        other = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".gguf", ".h5", ".msgpack"))
        hint = f" ({other[0]} is of a form that is not read)" if other else ""
        raise CheckpointError(
            f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there{hint}; give a folder with weights in safetensors files, "
            "such as save_pretrained writes"
        )
    try:
        index = read_mapping(folder / index_name, error=CheckpointError)
    except (json.JSONDecodeError, ModelError) as problem:
        raise CheckpointError(f"{folder / index_name}: {problem}") from problem
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{folder / index_name}: weight_map must say which file each tensor is in; copy the file again")
    files: dict[str, set[str]] = {}
    for key, name in named.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / index_name}: weight_map says that {key} is in {name!r}, expected a safetensors file beside it"
            )
        files.setdefault(name, set()).add(key)
    return files
