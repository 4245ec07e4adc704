"""Data sets of Hugging Face on disk: folders of save_to_disk (Arrow) and Parquet files, read row by row by pyarrow.

Images are never decoded here: the bytes of an image in a row are replaced by their address.
"""

import bisect
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from multimodal.data.forms.segments import EMBEDDED, EmbeddedAddress
from multimodal.data.remote import DataPath, RemotePath, at_once, name_in
from multimodal.values.errors import BraidError, DataError

_DIGESTED_BYTES = 2**20
_REMOTE_BLOCK = 2**16
"""Bytes of a remote Parquet file that are read at once, at least: those of its end, which describes it, that pyarrow asks for."""
_SPLIT_OF_NAME = re.compile(r"^(.*?)-\d{5}-of-\d{5}|^(train|test|val|valid|validation|dev|eval)\b")
"""Names as the hub writes them, or whole splits in one file."""


class _Piece(NamedTuple):
    """Successive rows of a file: a batch of Arrow, which is mapped into memory, or a group of rows of Parquet."""

    path: DataPath
    num_rows: int
    read: Callable[[list[str] | None], Any]
    """Returns the rows, at least these columns of them."""


class TableFiles:
    """The rows of Arrow or Parquet files, file after file."""

    def __init__(self, folder: DataPath, files: Sequence[DataPath], *, is_arrow: bool) -> None:
        """folder: names of files in digests are relative to it; is_arrow: batches as `datasets` writes them, else Parquet."""
        self._folder, self._paths, self._pieces_of = folder, files, _arrow_pieces if is_arrow else _parquet_pieces
        self._open_pieces: list[_Piece] | None = None
        self._starts: list[int] = []
        self._last: tuple[int, str, Any] = (-1, "", None)
        """The last piece and column of which a value was read, for reading in order."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_pieces": None, "_last": (-1, "", None)}

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where each row stands, and the row with addresses of images in place of their bytes; raises DataError."""
        number = 0
        for piece in self._pieces():
            for row in _guard(piece.path, lambda read=piece.read: read(None).to_pylist()):  # type: ignore[misc]
                yield f"row {number}", {name: _without_bytes(value, (number, name)) for name, value in row.items()}
                number += 1

    def embedded(self, address: str, *, block: int) -> BinaryIO:
        """Open the bytes at an address from `rows`; O(log pieces) and one piece."""
        row, column, *steps = json.loads(address.removeprefix(EMBEDDED))
        pieces = self._pieces()
        index = bisect.bisect_right(self._starts, row) - 1
        value = _guard(pieces[index].path, lambda: self._column(index, column)[row - self._starts[index]].as_py())
        for step in steps:
            value = value[step]
        assert isinstance(value, bytes)
        return BytesIO(value)

    def digest(self) -> str:
        """Digest the files."""
        return digest_files(self._folder, self._paths)

    def _pieces(self) -> list[_Piece]:
        if self._open_pieces is None:
            opened = at_once(lambda path: _guard(path, lambda: self._pieces_of(path)), self._paths, among=self._folder)
            self._open_pieces = [piece for pieces in opened for piece in pieces]
            self._starts = [0, *accumulate(piece.num_rows for piece in self._open_pieces)][:-1]
        return self._open_pieces

    def _column(self, index: int, column: str) -> Any:
        if self._last[:2] != (index, column):
            self._last = index, column, self._pieces()[index].read([column]).column(column)
        return self._last[2]


def _guard(path: DataPath, action: Callable[[], Any]) -> Any:
    """Run an action on a file; errors of pyarrow become a DataError that names the file."""
    try:
        return action()
    except BraidError:
        raise
    except ImportError as problem:
        raise DataError(f"{path}: needs the package 'pyarrow'; install it with: pip install 'braid[hf]'") from problem
    except Exception as problem:
        raise DataError(f"{path}: cannot be read ({str(problem).splitlines()[0]}); copy the data set again") from problem


def _arrow_pieces(path: DataPath) -> list[_Piece]:
    """Map the record batches of a stream into memory: reading a row costs only that row."""
    pyarrow = importlib.import_module("pyarrow")
    ipc = importlib.import_module("pyarrow.ipc")
    with ipc.open_stream(pyarrow.memory_map(str(path))) as reader:
        return [_Piece(path, batch.num_rows, lambda _, batch=batch: batch) for batch in reader]  # type: ignore[misc]


def _parquet_pieces(path: DataPath) -> list[_Piece]:
    source = path if isinstance(path, Path) else path.open("rb", _REMOTE_BLOCK)
    file = importlib.import_module("pyarrow.parquet").ParquetFile(source, memory_map=True)
    read = partial(file.read_row_group, use_threads=False)
    return [_Piece(path, file.metadata.row_group(index).num_rows, partial(read, index)) for index in range(file.num_row_groups)]


def digest_files(folder: DataPath, paths: Sequence[DataPath]) -> str:
    """Digest each file's name, length, beginning and end, which identify its content; of remote ones name, length and version."""
    digest = hashlib.blake2b(digest_size=16)
    for path, status in zip(paths, at_once(lambda path: path.stat(), paths, among=folder), strict=True):
        size = status.st_size
        if isinstance(path, RemotePath):
            digest.update(f"{name_in(folder, path)}\0{status}\0".encode())
            continue
        digest.update(f"{name_in(folder, path)}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_DIGESTED_BYTES))
            file.seek(max(0, size - _DIGESTED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def find_table_files(path: DataPath) -> TableFiles | None:
    """Return the tables in a folder, or None if there are none; raises DataError if it holds several splits."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(found.name for found in path.iterdir() if (found / "state.json").is_file())
        raise _several_splits(path, [str(path / split) for split in splits])
    if (path / "state.json").is_file():
        if isinstance(path, RemotePath):
            raise DataError(f"{path}: Arrow files are mapped into memory, and so must lie on this machine; save them as Parquet")
        state = path / "state.json"
        try:
            names = [str(entry["filename"]) for entry in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{state}: is not as save_to_disk writes it ({problem!r}); save the data set again") from problem
        for name in names:
            if Path(name).name != name or not (path / name).is_file():
                raise DataError(f"{state}: names {name}, which is not beside it; copy the whole data set")
        return TableFiles(path, [path / name for name in names], is_arrow=True)
    files: list[DataPath] = [*path.glob("*.parquet")] or [*path.glob("data/*.parquet")]
    files.sort(key=str)
    splits = sorted({match[1] or match[2] for file in files if (match := _SPLIT_OF_NAME.match(file.name))})
    if len(splits) > 1:
        raise _several_splits(path, [f"a folder of the {split}*.parquet alone" for split in splits])
    return TableFiles(path, files, is_arrow=False) if files else None


def _several_splits(path: DataPath, choices: list[str]) -> DataError:
    return DataError(f"{path}: a data set of several splits; give --data-path one of them: {' or '.join(choices)}")


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
