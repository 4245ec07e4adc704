"""The data sets that --data-path names with their shares: words, and files of Energon's Metadataset v2, which may be nested."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from multimodal.values.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")
_REMOTE = "://"
_SHARES = {"blend": "weight", "blend_epochized": "repetitions"}
_OF_PATH = {"path", "split_part", "split", "subset", "subflavors", "shuffle_over_epochs_multiplier"}
"""Keys beside a path; subflavors only describe, and samples are always drawn from the whole set."""


@dataclass(frozen=True)
class NamedData:
    """One data set of a mixture."""

    path: str
    weight: float | None = None
    """Its share of every global batch, in any unit; None: in proportion to its number of training samples."""
    repetitions: float = 1.0
    """Without a weight: how often it is seen while those of 1 are seen once."""
    ranges: tuple[tuple[float, float], ...] = ()
    """Only these samples, each range of those that the one before leaves: numbers, or shares of 1 as floats."""

    @property
    def name(self) -> str:
        """The last two parts of the path, such as FOLDER/SPLIT."""
        return "/".join(Path(self.path).parts[-2:])

    def samples(self, num_samples: int) -> range:
        """Return the samples that are taken, of so many."""
        found = range(num_samples)
        for ends in self.ranges:
            first, last = (int(len(found) * end) if isinstance(end, float) and end <= 1 else end for end in ends)
            found = found[int(first) : None if last == math.inf else int(last)]
        return found


_Blend = tuple[str | None, tuple[NamedData, ...]]
"""How it shares, by `_SHARES` (None: a single data set), and the data sets."""


def read_mixture(words: Sequence[str]) -> tuple[NamedData, ...]:
    """Return the data sets of a mixture; raises ConfigError if numbers and paths do not alternate, or a path is repeated."""
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        blends = [read_data_path(word) for word in words]
        _, found = blends[0] if len(blends) == 1 else _join("repetitions", [(1.0, blend) for blend in blends])
    else:
        weights, paths = numbers[::2], words[1::2]
        if len(words) % 2 or None in weights or any(number is not None for number in numbers[1::2]):
            expected = "expected a weight before every path (0.7 a.jsonl 0.3 b.jsonl) or before none"
            raise ConfigError(f"--data-path {' '.join(words)}: {expected}")
        for weight, path in zip(weights, paths, strict=True):
            if weight is not None and not 0 < weight < math.inf:
                raise ConfigError(f"--data-path {weight:g} {path}: the weight must be above 0; correct it or leave it out")
        _, found = _join("weight", [(weight or 0.0, read_data_path(path)) for weight, path in zip(weights, paths, strict=True)])
    for data in found:
        if [(other.path, other.ranges) for other in found].count((data.path, data.ranges)) > 1:
            raise ConfigError(f"--data-path: {data.path} is there twice; give it once, with a larger weight")
    return found


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _join(kind: str, entries: Sequence[tuple[float, _Blend]], where: str = "--data-path") -> _Blend:
    """Return one blend of several, with their shares; raises ConfigError for blends of the other kind among them."""
    found: list[NamedData] = []
    for share, (inner, data_sets) in entries:
        if inner not in (None, kind):
            raise ConfigError(f"{where}: a blend by weight and one by repetitions are not joined; write both as one kind")
        total = math.fsum(each.weight or 1.0 for each in data_sets)
        for each in data_sets:
            if kind == "weight":
                found.append(replace(each, weight=share if each.weight is None else share * each.weight / total))
            else:
                found.append(replace(each, repetitions=share * each.repetitions))
    return kind, tuple(found)


def read_data_path(word: str) -> _Blend:
    """Return the data sets at a path: those of a metadataset's split (FILE.yaml/SPLIT, by default train), or the path itself.

    Raises ConfigError for a metadataset that is there and cannot be read as it is meant.
    """
    path, split = Path(word), "train"
    if path.parent.suffix in _SUFFIXES:
        path, split = path.parent, path.name
    if path.suffix not in _SUFFIXES or _REMOTE in word or not path.exists():  # what is not there is missed when data are opened
        return None, (NamedData(word),)
    try:
        described = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ConfigError(f"--data-path {path}: cannot be read as YAML ({' '.join(str(problem).split())}); correct it") from None
    splits = described.get("splits") if isinstance(described, dict) else None
    if not isinstance(splits, dict) or described.get("__class__") != "MetadatasetV2":
        raise ConfigError(f"--data-path {path}: is no Metadataset v2 of Energon: no `__class__: MetadatasetV2` with `splits`")
    if split not in splits:
        choices = ", ".join(f"{path}/{each}" for each in splits)
        raise ConfigError(f"--data-path {path}: has no split '{split}'; give one of {choices or '(none)'}")
    try:
        return _node(splits[split], path, split, f"--data-path {path}, {split}")
    except RecursionError:
        raise ConfigError(f"--data-path {path}: names itself, or a file that does; write what is meant") from None


def _node(node: Any, file: Path, split: str, where: str) -> _Blend:
    """Return the data sets of a split, or of an entry of one."""
    kind = next((key for key in _SHARES if isinstance(node, dict) and key in node), None)
    keys = {kind, "subset"} if kind else {*_OF_PATH}
    if not isinstance(node, dict) or (kind is None and not isinstance(node.get("path"), str)):
        raise ConfigError(f"{where}: expected a `path`, `blend` or `blend_epochized`; joins are not there: write joined samples")
    if others := [key for key in node if key not in keys]:
        raise ConfigError(f"{where}: '{others[0]}' is not supported; leave it out, or write the data set as it describes")
    if kind is None:
        name, path = node.get("split_part", node.get("split", split)), file.parent / node["path"]
        is_nested = path.suffix in _SUFFIXES and _REMOTE not in node["path"]
        has_splits = is_nested or (path / ".nv-meta").is_dir()
        found = read_data_path(node["path"] if _REMOTE in node["path"] else str(path / name) if has_splits else str(path))
    else:
        is_nested, share, entries = True, _SHARES[kind], []
        if not isinstance(node[kind], list) or not all(isinstance(entry, dict) for entry in node[kind]) or not node[kind]:
            raise ConfigError(f"{where}: `{kind}` must be a list of entries with a `path`; correct it")
        for number, entry in enumerate(node[kind]):
            rest, amount = {key: value for key, value in entry.items() if key != share}, entry.get(share, 1.0)
            if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 < amount < math.inf:
                raise ConfigError(f"{where}, entry {number}: `{share}` must be a number above 0, found {amount!r}; correct it")
            entries.append((float(amount), _node(rest, file, split, f"{where}, entry {number}")))
        found = _join(share, entries, where)
    if (subset := node.get("subset")) is None:
        return found
    ends = _range(subset, is_nested=is_nested, where=where)
    return found[0], tuple(replace(each, ranges=(*each.ranges, ends)) for each in found[1])


def _range(subset: Any, *, is_nested: bool, where: str) -> tuple[float, float]:
    ends = subset.get("range") if isinstance(subset, dict) and len(subset) == 1 else None
    found = [*_ends(ends)] if isinstance(ends, list) and len(ends) == 2 else []
    is_share = [isinstance(end, float) and end <= 1 for end in found]
    if len(found) < 2 or is_share[0] != is_share[1] or not 0 <= found[0] < found[1] or (is_nested and not all(is_share)):
        raise ConfigError(
            f"{where}: `subset` must be like {{range: [0%, 50%]}}"
            f"{'' if is_nested else ', {range: [0, 100]} or {range: [100, end]}'}, found {subset!r}; correct it"
        )
    return found[0], found[1]


def _ends(ends: Sequence[Any]) -> Iterator[float]:
    """Yield shares of 1 as floats, and numbers of samples; nothing for what is neither."""
    for end in ends:
        share = _number(end[:-1]) if isinstance(end, str) and end.endswith("%") else None
        if share is not None and 0 <= share <= 100:
            yield share / 100
        elif end == "end":
            yield math.inf
        elif isinstance(end, int) and not isinstance(end, bool):
            yield end
