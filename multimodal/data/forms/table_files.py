"""Data sets of Hugging Face on disk: folders of save_to_disk (Arrow) and Parquet files, read row by row by pyarrow.

Images are never decoded here: the bytes of an image in a row are replaced by their address.
"""

import bisect
import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from multimodal.data.forms.segments import EMBEDDED, EmbeddedAddress
from multimodal.values.errors import DataError

_PARQUET = b"PAR1"
_DIGESTED_BYTES = 2**20
_SPLIT_OF_NAME = re.compile(r"^(.*?)-\d{5}-of-\d{5}|^(train|test|val|valid|validation|dev|eval)\b")
"""Names as the hub writes them, or whole splits in one file."""
_Batch = Any


class TableFiles:
    """The rows of Arrow or Parquet files, file after file."""

    def __init__(self, folder: Path, files: list[Path], *, is_arrow: bool) -> None:
        """folder: names of files in digests are relative to it; is_arrow: batches as `datasets` writes them, else Parquet."""
        self._folder, self._paths, self._is_arrow = folder, files, is_arrow
        self._open_files: list[_ArrowFile | _ParquetFile] | None = None
        self._starts: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_files": None}

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where each row stands, and the row with addresses of images in place of their bytes; raises DataError."""
        number = 0
        for file in self._files():
            for index in range(file.num_batches):
                for row in self._guard(file, lambda file=file, index=index: file.batch(index).to_pylist()):  # type: ignore[misc]
                    yield f"row {number}", {name: _without_bytes(value, (number, name)) for name, value in row.items()}
                    number += 1

    def embedded(self, address: str) -> bytes:
        """Return the bytes at an address from `rows`; O(log files) and one batch."""
        row, column, *steps = json.loads(address.removeprefix(EMBEDDED))
        files = self._files()
        index = bisect.bisect_right(self._starts, row) - 1
        value = self._guard(files[index], lambda: files[index].value(row - self._starts[index], column))
        for step in steps:
            value = value[step]
        assert isinstance(value, bytes)
        return value

    def digest(self) -> str:
        """Digest the files."""
        return digest_files(self._folder, self._paths)

    def _files(self) -> "list[_ArrowFile | _ParquetFile]":
        if self._open_files is None:
            kind = _ArrowFile if self._is_arrow else _ParquetFile
            self._open_files = [self._guard(path, lambda path=path: kind(path)) for path in self._paths]  # type: ignore[misc]
            self._starts = [0, *accumulate(file.num_rows for file in self._open_files)][:-1]
        return self._open_files

    def _guard(self, file: Any, action: Any) -> Any:
        """Run an action on a file; errors of pyarrow become a DataError that names the file."""
        path = getattr(file, "path", file)
        try:
            return action()
        except ImportError as problem:
            raise DataError(f"{path}: needs the package 'pyarrow'; install it with: pip install braid[hf]") from problem
        except Exception as problem:
            raise DataError(f"{path}: cannot be read ({str(problem).splitlines()[0]}); copy the data set again") from problem


def digest_files(folder: Path, paths: list[Path]) -> str:
    """Digest every file's name in a folder, length, beginning and end, where formats store what identifies their content."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_DIGESTED_BYTES))
            file.seek(max(0, size - _DIGESTED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


class _ArrowFile:
    """A stream of record batches, mapped into memory: reading a row costs only that row."""

    def __init__(self, path: Path) -> None:
        pyarrow = importlib.import_module("pyarrow")
        ipc = importlib.import_module("pyarrow.ipc")
        self.path = path
        with ipc.open_stream(pyarrow.memory_map(str(path))) as reader:
            self._batches = list(reader)
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self.num_rows, self.num_batches = self._starts[-1], len(self._batches)

    def batch(self, index: int) -> _Batch:
        """Return some rows."""
        return self._batches[index]

    def value(self, row: int, column: str) -> Any:
        """Return one value."""
        index = bisect.bisect_right(self._starts, row) - 1
        return self._batches[index].column(column)[row - self._starts[index]].as_py()


class _ParquetFile:
    """Parquet is read by groups of rows; the last group is kept, for reading in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = importlib.import_module("pyarrow.parquet").ParquetFile(path, memory_map=True)
        sizes = [self._file.metadata.row_group(index).num_rows for index in range(self._file.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]
        self.num_rows, self.num_batches = self._starts[-1], len(sizes)
        self._last: tuple[int, str, Any] = (-1, "", None)

    def batch(self, index: int) -> _Batch:
        """Return a group of rows."""
        return self._file.read_row_group(index, use_threads=False)

    def value(self, row: int, column: str) -> Any:
        """Return one value."""
        index = bisect.bisect_right(self._starts, row) - 1
        if self._last[:2] != (index, column):
            self._last = (index, column, self._file.read_row_group(index, columns=[column], use_threads=False).column(column))
        return self._last[2][row - self._starts[index]].as_py()


def find_table_files(path: Path) -> TableFiles | None:
    """Return the tables at a path, or None if there are none; raises DataError if it holds several splits."""
    if path.is_file():
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        return TableFiles(path.parent, [path], is_arrow=False) if is_parquet else None
    if (path / "dataset_dict.json").is_file():
        splits = sorted(found.parent.name for found in path.glob("*/state.json"))
        raise _several_splits(path, [str(path / split) for split in splits])
    if (path / "state.json").is_file():
        return TableFiles(path, _files_of_state(path / "state.json"), is_arrow=True)
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    splits = sorted({match[1] or match[2] for file in files if (match := _SPLIT_OF_NAME.match(file.name))})
    if len(splits) > 1:
        raise _several_splits(path, [f"a folder of the {split}*.parquet alone" for split in splits])
    return TableFiles(path, files, is_arrow=False) if files else None


def _several_splits(path: Path, choices: list[str]) -> DataError:
    return DataError(f"{path}: a data set of several splits; give --data-path one of them: {' or '.join(choices)}")


def _files_of_state(state: Path) -> list[Path]:
    try:
        names = [str(entry["filename"]) for entry in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"{state}: is not as save_to_disk writes it ({problem!r}); save the data set again") from problem
    for name in names:
        if Path(name).name != name or not (state.parent / name).is_file():
            raise DataError(f"{state}: names {name}, which is not beside it; copy the whole data set")
    return [state.parent / name for name in names]


def _without_bytes(value: Any, address: tuple[int | str, ...]) -> Any:
    """Return a value with the address of bytes in their place; an image without bytes is its path."""
    if isinstance(value, bytes):
        return EmbeddedAddress(EMBEDDED + json.dumps(address))
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"}:
            return _without_bytes(value["bytes"], (*address, "bytes")) if value["bytes"] is not None else value["path"]
        return {name: _without_bytes(inner, (*address, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_bytes(inner, (*address, index)) for index, inner in enumerate(value)]
    return value
