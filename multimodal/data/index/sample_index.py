"""An index of samples: their tokens and the sizes of their items as arrays, in memory or in files that ranks share.

One process writes it, block by block, under a hidden name that is renamed when it is complete; then all processes of a node map
it into memory. If that process is killed, the next one goes on behind its last block.
"""

import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.conversation import Conversation
from multimodal.values.arrays.rows import row_starts
from multimodal.values.units.items import Grid

_SUMMARY, _LOCK = "index.json", "lock"
_HIDDEN = ".writing-"
_KEPT_SECONDS = 7 * 86400.0
"""Time after which nobody is expected to go on with an index that is not complete."""
FORMAT = 7
"""Version of what is written, and of how samples become tokens."""
_ARRAYS = {
    "token_ids": "int32",
    "is_trained": "bool",
    "token_starts": "int64",
    "is_cut": "bool",
    "loss_weights": "float64",
    "items": "int64",
    "item_starts": "int64",
    "places": "uint8",
    "place_starts": "int64",
    "paths": "uint8",
    "path_starts": "int64",
}
"""Name -> type of its values."""
_STARTS = {
    "token_starts": ("is_cut", "token_ids"),
    "item_starts": ("is_cut", "items"),
    "place_starts": ("is_cut", "places"),
    "path_starts": ("items", "paths"),
}
"""Name -> for each row of which array, the first of its rows in which array; and the end of all."""
_ITEM_NUMBERS = 9
"""Columns of `items`: unit, start, output tokens, width, height, tile, rows, columns, time (NO_TIME if the grid has none)."""
NO_TIME = -1


@dataclass(frozen=True, slots=True)
class IndexedItem:
    """One item of a sample that fits into seq_length."""

    unit: str
    """The encoder that takes it, or the generator that makes it."""
    path: str
    size: tuple[int, int]
    """(width, height) of its file in pixels; for sound (samples at 16 kHz, 1)."""
    grid: Grid
    tile: int = 0


class IndexedSample(NamedTuple):
    """A tokenised sample."""

    where: str
    """File, line and sample, for messages."""
    conversation: Conversation
    items: tuple[IndexedItem, ...]


class SampleIndex:
    """Samples by number, O(1) each; the values of a sample are only copied on request."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], summary: Mapping[str, Any]) -> None:
        """Take the arrays and the summary that `build_index` made; raises ValueError if they are not such."""
        self.arrays, self.summary = arrays, summary
        _check_arrays(arrays, summary)

    def __len__(self) -> int:
        return len(self.arrays["is_cut"])

    @property
    def skipped(self) -> Mapping[str, int]:
        """Reason for leaving samples out -> number of such samples."""
        return self.summary["skipped"]

    @property
    def num_cut(self) -> int:
        """Number of samples whose end was cut off."""
        return int(self.arrays["is_cut"].sum())

    def conversation(self, index: int) -> Conversation:
        """The tokens of a sample."""
        arrays, tokens = self.arrays, self._slice("token_starts", index)
        items = arrays["items"][self._slice("item_starts", index)]
        starts = tuple((number, start, outputs) for number, (start, outputs) in enumerate(items[:, 1:3].tolist()))
        facts = bool(arrays["is_cut"][index]), float(arrays["loss_weights"][index])
        return Conversation(arrays["token_ids"][tokens], arrays["is_trained"][tokens], starts, *facts)

    def num_items(self, index: int) -> int:
        """Count the items of a sample."""
        first, last = self.arrays["item_starts"][index : index + 2]
        return int(last - first)

    def item(self, index: int, item_index: int) -> IndexedItem:
        """One item of a sample; raises IndexError beyond the last."""
        if not 0 <= item_index < self.num_items(index):
            raise IndexError(f"item {item_index} of sample {index}, which has {self.num_items(index)}")
        number = int(self.arrays["item_starts"][index]) + item_index
        unit, _, _, width, height, tile, rows, columns, time = self.arrays["items"][number].tolist()
        grid = (rows, columns) if time == NO_TIME else (rows, columns, time)
        return IndexedItem(self.summary["units"][unit], self._text("paths", number), (width, height), grid, tile)

    def where(self, index: int) -> str:
        """Return the origin of a sample (file and line), for messages."""
        return self._text("places", index)

    def _slice(self, name: str, index: int) -> slice:
        first, last = self.arrays[name][index : index + 2].tolist()
        return slice(first, last)

    def _text(self, name: str, index: int) -> str:
        return bytes(self.arrays[name][self._slice(f"{name[:-1]}_starts", index)]).decode(errors="surrogatepass")


def build_index(samples: Iterable[IndexedSample | str]) -> SampleIndex:
    """Build the index of these samples, in memory; a text stands for one that is left out, and says why."""
    skipped: Counter[str] = Counter()
    conversations: list[Conversation] = []
    places, paths = [], []
    items: list[tuple[int, ...]] = []
    units: dict[str, int] = {}
    for sample in samples:
        if isinstance(sample, str):
            skipped[sample] += 1
            continue
        place, conversation, of_sample = sample
        conversations.append(conversation)
        places.append(place)
        for item, (_, start, outputs) in zip(of_sample, conversation.item_starts, strict=True):
            unit = units.setdefault(item.unit, len(units))
            items.append((unit, start, outputs, *item.size, item.tile, *item.grid, *[NO_TIME][: 3 - len(item.grid)]))
            paths.append(item.path)
    arrays = {
        "token_ids": np.concatenate([np.empty(0, np.int32), *(conversation.token_ids for conversation in conversations)]),
        "is_trained": np.concatenate([np.empty(0, np.bool_), *(conversation.is_trained for conversation in conversations)]),
        "token_starts": row_starts([len(conversation.token_ids) for conversation in conversations]),
        "is_cut": np.array([conversation.is_cut for conversation in conversations], dtype=np.bool_),
        "loss_weights": np.array([conversation.loss_weight for conversation in conversations], dtype=np.float64),
        "items": np.array(items, dtype=np.int64).reshape(-1, _ITEM_NUMBERS),
        "item_starts": row_starts([len(conversation.item_starts) for conversation in conversations]),
    }
    for name, texts in (("places", places), ("paths", paths)):
        encoded = [text.encode(errors="surrogatepass") for text in texts]
        arrays[name] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        arrays[f"{name[:-1]}_starts"] = row_starts([len(text) for text in encoded])
    return SampleIndex(arrays, {"format": FORMAT, "units": list(units), "skipped": dict(skipped)})


def join_indices(blocks: Iterable[SampleIndex]) -> SampleIndex:
    """Return the index of the samples of all blocks, in memory."""
    joined = _Joined()
    parts = [*map(joined.next_rows, (build_index(()), *blocks))]
    return SampleIndex({name: np.concatenate([part[name] for part in parts]) for name in _ARRAYS}, joined.summary)


def write_index(build: Callable[[int], Iterable[SampleIndex]], folder: Path) -> None:
    """Write the index of the samples of all blocks, none of which is kept, into a new folder, which appears when complete.

    build: makes the blocks behind so many samples, which are those that a process had written when it was killed, or 0. Raises
    OSError, and what making the blocks raises.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _unfinished(folder) as hidden, ExitStack() as stack:
        joined = _read_progress(hidden)
        files = {name: stack.enter_context((hidden / name).open("ab")) for name in _ARRAYS}
        for name, file in files.items():
            file.truncate(_num_bytes(name, joined.num_rows[name]))
        for rows in map(joined.next_rows, chain((build_index(()),), build(joined.num_samples))):
            for name, file in files.items():
                file.write(rows[name].tobytes())
                file.flush()
            (hidden / f"{_SUMMARY}.new").write_text(json.dumps(joined.summary))
            os.replace(hidden / f"{_SUMMARY}.new", hidden / _SUMMARY)
        for file in files.values():  # else a power cut could leave zeros under the final name
            os.fsync(file.fileno())
        (hidden / _LOCK).unlink(missing_ok=True)
        hidden.chmod(0o755)
        try:
            os.rename(hidden, folder)
        except OSError:
            if read_index(folder) is None:  # else another run has written the same meanwhile
                shutil.rmtree(folder)
                os.rename(hidden, folder)


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Give the hidden folder of what will be `folder`, with what was written when a process was killed.

    A process that finds another at work there gets a folder of its own.
    """
    for left in folder.parent.glob(f"{_HIDDEN}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    shared = hidden = folder.with_name(f"{_HIDDEN}{folder.name}")
    shared.mkdir(exist_ok=True)
    with (shared / _LOCK).open("ab") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which forked processes do not keep
        except OSError:
            hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=folder.parent))
        try:
            yield hidden
        except BaseException as problem:
            if isinstance(problem, OSError) or hidden != shared or not (hidden / _SUMMARY).exists():
                shutil.rmtree(hidden, ignore_errors=True)  # also what fills a disk
            raise
        shutil.rmtree(hidden, ignore_errors=True)


def _read_progress(hidden: Path) -> "_Joined":
    """Return what was joined in a folder, nothing if its files do not hold that."""
    with suppress(OSError, ValueError):
        joined = _Joined(json.loads((hidden / _SUMMARY).read_bytes()))
        if all((hidden / name).stat().st_size >= _num_bytes(name, joined.num_rows[name]) for name in _ARRAYS):
            return joined
    return _Joined()


class _Joined:
    """Counts what was joined so far, for the numbers in the rows that follow."""

    def __init__(self, summary: Mapping[str, Any] | None = None) -> None:
        """summary: of what this goes on with."""
        found = summary or {}
        self._units: dict[str, int] = {name: number for number, name in enumerate(found.get("units", ()))}
        self._skipped = Counter[str](found.get("skipped"))
        self.num_rows: dict[str, int] = found.get("num_rows") or dict.fromkeys(_ARRAYS, 0)
        """Name of an array -> its rows."""

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the index, and everything that this counts."""
        return {"format": FORMAT, "units": list(self._units), "skipped": dict(self._skipped), "num_rows": self.num_rows}

    @property
    def num_samples(self) -> int:
        """Samples that were joined or left out."""
        return self.num_rows["is_cut"] + sum(self._skipped.values())

    def next_rows(self, block: SampleIndex) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of the next block, by name; those of the first one say where the first rows start, too."""
        self._skipped.update(block.skipped)
        rows = dict(block.arrays)
        units = [self._units.setdefault(name, len(self._units)) for name in block.summary["units"]]
        items = rows["items"] = rows["items"].copy()
        items[:, 0] = np.array([*units, 0])[items[:, 0]]
        for starts, (_, started) in _STARTS.items():
            rows[starts] = rows[starts][min(1, self.num_rows[starts]) :] + self.num_rows[started]
        for name, values in rows.items():
            self.num_rows[name] += len(values)
        return rows


def _shape(name: str, num_rows: int) -> tuple[int, ...]:
    return (num_rows, _ITEM_NUMBERS) if name == "items" else (num_rows,)


def _num_bytes(name: str, num_rows: int) -> int:
    """Return the bytes of an array's file, which holds nothing but its values."""
    return math.prod(_shape(name, num_rows)) * np.dtype(_ARRAYS[name]).itemsize


def read_index(folder: Path) -> SampleIndex | None:
    """Map a written index into memory; None if there is none, or it is damaged."""
    try:
        summary = json.loads((folder / _SUMMARY).read_bytes())
        shapes = {name: _shape(name, summary["num_rows"][name]) for name in _ARRAYS}
        arrays = {  # empty files cannot be mapped
            name: np.asarray(np.memmap(folder / name, _ARRAYS[name], "r", shape=shape))
            if shape[0]
            else np.empty(shape, _ARRAYS[name])
            for name, shape in shapes.items()
        }
        return SampleIndex(arrays, summary)
    except (OSError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _check_arrays(arrays: Mapping[str, npt.NDArray[Any]], summary: Mapping[str, Any]) -> None:
    """Raise ValueError for arrays that do not form an index; O(1)."""
    if not isinstance(summary, Mapping) or summary.get("format") != FORMAT:
        raise ValueError("an index of another format")
    if not isinstance(summary.get("units"), list) or not isinstance(summary.get("skipped"), Mapping):
        raise ValueError("an index without its summary")
    if {name: str(array.dtype) for name, array in arrays.items()} != _ARRAYS:
        raise ValueError("an index with other arrays")
    shapes = {name: array.shape for name, array in arrays.items()}
    alike = ("is_trained", "token_ids"), ("loss_weights", "is_cut")
    if shapes["items"][1:] != (_ITEM_NUMBERS,) or any(shapes[name] != shapes[other] for name, other in alike):
        raise ValueError("an index with arrays of other shapes")
    for name, (owners, rows) in _STARTS.items():
        starts = arrays[name]
        if starts.shape != (shapes[owners][0] + 1,) or (starts[0], starts[-1]) != (0, shapes[rows][0]):
            raise ValueError(f"an index that is cut off ({name})")
