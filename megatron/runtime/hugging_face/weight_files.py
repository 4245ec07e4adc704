"""Reads the safetensors files of a Hugging Face folder, as a whole or in parts."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.runtime.checkpoint.storage import bytes_of
from multimodal.hugging_face.safetensors_header import read_header
from multimodal.values.errors import CheckpointError, ModelError
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
_VALUES_AT_ONCE = 2**18
"""Values that are read at a time, few enough to be in a CPU's cache still when they are checked."""


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
        self.folder, self._files = folder, ExitStack()
        self._open: dict[str, BufferedReader] = {}
        self._starts: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}
        weights: dict[str, SavedWeight] = {}
        metadata: dict[str, Mapping[str, str]] = {}
        for name, keys in _list_files(folder, single=single).items():
            path = folder / name
            try:
                tensors, metadata[name] = read_header(path)
                self._open[name] = self._files.enter_context(open(path, "rb"))  # noqa: SIM115
                mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
            except FileNotFoundError as problem:
                raise CheckpointError(f"{path}: no such file, though the index names it; copy the whole folder") from problem
            except (ValueError, OSError) as problem:
                raise CheckpointError(f"{path}: cannot be read ({problem}); copy the file again") from problem
            for key, (kind, shape, start, stop) in tensors.items():
                if kind not in DTYPES:
                    raise CheckpointError(
                        f"{path}: {key} is of type {kind}, expected one of {', '.join(DTYPES)}; take the model whose weights are "
                        "not quantised"
                    )
                weights[key], self._starts[key] = SavedWeight(name, DTYPES[kind], shape), start
                self._values[key] = torch.asarray(mapped[start:stop], dtype=torch.uint8).view(DTYPES[kind]).view(shape)
            if missing := sorted(keys - tensors.keys()):
                raise CheckpointError(f"{path}: {missing[0]} is missing, which the index says is there; copy the folder again")
        self.weights, self.metadata = weights, metadata

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read_whole(self, key: str) -> Tensor:
        """Return a tensor: a view of its file, which is read when it is used."""
        return self._values[key]

    def read(self, key: str, rows: range, columns: range, *, row_size: int, target: Tensor) -> Iterator[Tensor]:
        """Fill `target` with rows and columns of a tensor as a matrix; yields what is filled, while a CPU has it in its cache.

        Where it has the very bytes of the file they are read into it, which takes less time than a copy from a view, whose pages
        the system has to map one after another. row_size: its columns as a matrix.
        """
        weight = self.weights[key]
        is_same = target.dtype == weight.dtype and target.device.type == "cpu" and target.is_contiguous()
        if not is_same or len(columns) != row_size:
            part = self._values[key].view(-1, row_size)[rows.start : rows.stop, columns.start : columns.stop]
            yield target.copy_(part.reshape(target.shape))
            return
        file = self._open[weight.file]
        file.seek(self._starts[key] + rows.start * row_size * weight.dtype.itemsize)
        for block in target.view(-1).split(_VALUES_AT_ONCE):
            if file.readinto(bytes_of(block)) != block.nbytes:
                raise CheckpointError(f"{self.folder / weight.file}: ends within {key}; copy the file again")
            yield block


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
