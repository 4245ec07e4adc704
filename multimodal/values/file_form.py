"""The file form that all values share: YAML or JSON, told apart by the file's suffix; of YAML, what no reader could misread."""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml

from multimodal.values.errors import BraidError, ConfigError
from multimodal.values.typed_reader import to_plain

T = TypeVar("T")
LARGEST_FILE_BYTES = 64 * 2**20


def read_file(path: str | Path, build: Callable[[dict[str, Any]], T], *, error: type[BraidError]) -> T:
    """Read a YAML or JSON file and build a value from it; an error of the file or of `build` names the file and the line."""
    value = read_mapping(path, error=error)
    try:
        return build(value)
    except BraidError as problem:
        raise at_line(path, problem) from None


class FromFile(ABC):
    """A value whose plain form a YAML or JSON file can hold."""

    __slots__ = ()
    file_error: ClassVar[type[BraidError]] = ConfigError
    """Raised where a file or its value is wrong."""

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Build from the plain form; raises `file_error`."""

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a YAML or JSON file; a `file_error` names the line."""
        return read_file(path, cls.from_dict, error=cls.file_error)


class FileValue(FromFile):
    """A value that is also written; its plain form is that of its fields, unless it has another one."""

    __slots__ = ()
    has_short_lists: ClassVar[bool] = False
    """True if innermost lists go on one line of a YAML file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return dict(to_plain(self))

    def to_file(self, path: str | Path) -> None:
        """Write a YAML or JSON file."""
        write_mapping(path, self.to_dict(), has_short_lists=self.has_short_lists)


def read_mapping(path: str | Path, *, error: type[BraidError]) -> dict[str, Any]:
    """Read a YAML or JSON file whose top level is a mapping; all of its keys are texts, and no key is repeated.

    Raises `error`, with the path and, where it is known, the line, if the file cannot be read or parsed, or is no mapping.
    """
    path = Path(path)
    text = read_text(path, error=error)
    try:
        if path.suffix == ".json":
            value = json.loads(text, object_pairs_hook=collect_pairs)
            check_depth(value)
        else:
            value = deepcopy(_parse(text))
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise error(_describe(path, text, problem)) from None
    if value is None:
        raise error(f"{path}: expected a mapping at the top level, found nothing; write its keys and values")
    if not isinstance(value, dict):
        raise error(f"{path}: expected a mapping at the top level, found {type(value).__name__}")
    return value


def read_table(path: Path) -> dict[str, Any]:
    """Read a YAML file of Braid's own, unchecked, in a third of the time with libyaml; 1.0e-6 is a number, 1e-6 a text."""
    table: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


@lru_cache(maxsize=16)  # programs read the same few files again and again
def _parse(text: str) -> Any:
    return yaml.load(text, Loader=Document)


def read_text(path: str | Path, *, error: type[BraidError]) -> str:
    """Read a text file of bounded size as UTF-8; raises `error` with the path and the fix."""
    path = Path(path)
    try:
        if not path.is_file():
            problem = "is a folder or a device" if path.exists() else "no such file"
            raise error(f"{path}: {problem}; give the path of an existing .yaml or .json file")
        if (size := path.stat().st_size) > LARGEST_FILE_BYTES:
            raise error(f"{path}: expected at most {LARGEST_FILE_BYTES:,} bytes, found {size:,}; is it the right file?")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError as wrong:
        line = wrong.object[: wrong.start].count(b"\n") + 1
        raise error(
            f"{path}, line {line}: expected UTF-8 text, found byte 0x{wrong.object[wrong.start]:02x}; save the file as UTF-8"
        ) from None


def write_mapping(path: str | Path, value: dict[str, Any], *, has_short_lists: bool = False) -> None:
    """Write `value` as JSON when the suffix is .json, else as YAML; has_short_lists: innermost lists go on one line."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    else:
        style: dict[str, Any] = {"default_flow_style": None, "width": 130} if has_short_lists else {}
        path.write_text(yaml.safe_dump(value, sort_keys=False, **style), encoding="utf-8")


def at_line(path: str | Path, problem: BraidError) -> BraidError:
    """Return the same error with the file and the line of its place in front of the message."""
    line = line_of(path, problem.place) if problem.place else None
    where = f"{path}" if line is None else f"{path}, line {line}"
    return type(problem)(f"{where}: {problem}", place=problem.place)


def line_of(path: str | Path, place: Sequence[str | int]) -> int | None:
    """Return the line of a value in a YAML or JSON file, counted from 1; None if unknown.

    place: keys and indices that lead to the value; if the file lacks the last of them, the line of the enclosing value.
    """
    try:
        node = _compose(Path(path), read_text(path, error=BraidError))
    except (BraidError, yaml.YAMLError):
        return None
    line = 1
    for step in place:
        if isinstance(node, yaml.MappingNode):
            entry = next(((key, value) for key, value in node.value if key.value == str(step)), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _compose(path: Path, text: str) -> yaml.Node | None:
    """Compose the nodes of a YAML or JSON text, which know their lines; tabs are allowed in JSON though not in YAML."""
    return yaml.compose(text.replace("\t", " ") if path.suffix == ".json" else text, Loader=Document)


def _describe(path: Path, text: str, problem: Exception) -> str:
    """Return the message about a text that cannot be parsed; YAML's parser finds the line of most problems in JSON, too."""
    if isinstance(problem, json.JSONDecodeError):
        return f"{path}, line {problem.lineno}: cannot be parsed ({problem.msg}); correct the syntax there"
    if isinstance(problem, RecursionError):
        return f"{path}: cannot be parsed (nested too deeply); write it flatter"
    if path.suffix == ".json":
        try:
            _compose(path, text)
        except yaml.YAMLError as located:
            problem = located
    mark = getattr(problem, "problem_mark", None)
    where = f"{path}" if mark is None else f"{path}, line {mark.line + 1}"
    if isinstance(problem, yaml.MarkedYAMLError):
        reason = ", ".join(part for part in (problem.context, problem.problem) if part)
    else:
        reason = " ".join(str(problem).split())
    return f"{where}: cannot be parsed ({reason}); correct it there"


LARGEST_DEPTH = 50
LARGEST_ALIASED_NODES = 100_000
"""The most nodes that aliases repeat in one file, each counted with all nodes inside it."""
LARGEST_INTEGER_BITS = 10_000
"""Python can still print integers of this size; readers of a number set closer bounds, and can name its key."""
_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_RIDDLE = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers in base 8 or 60 as YAML 1.1 reads them: 010 is 8, 1:30 is 90."""
_TEXT = "tag:yaml.org,2002:str"


class Document(yaml.SafeLoader):
    """PyYAML's safe loader that refuses what PyYAML accepts silently; raises yaml.MarkedYAMLError."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._num_nodes = 0
        self._num_aliased_nodes = 0
        self._size_of_anchor: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; refuses deep nesting, aliases inside the node that they refer to, and aliases that repeat too much."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            size = self._size_of_anchor.get(str(event.anchor), 0)
            if event.anchor in self.anchors and event.anchor not in self._size_of_anchor:
                raise _refusal(f"*{event.anchor} stands inside what it names", event)
            self._num_nodes, self._num_aliased_nodes = self._num_nodes + size, self._num_aliased_nodes + size
            if self._num_aliased_nodes > LARGEST_ALIASED_NODES:
                raise _refusal(f"aliases repeat more than {LARGEST_ALIASED_NODES:,} values; write out what is meant", event)
            return super().compose_node(parent, index)
        if self._depth == LARGEST_DEPTH:
            raise _refusal(f"nested deeper than {LARGEST_DEPTH} levels", event)
        before, self._num_nodes, self._depth = self._num_nodes, self._num_nodes + 1, self._depth + 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._size_of_anchor[event.anchor] = self._num_nodes - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; refuses keys that are no texts, and repeated keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            if key.tag != _TEXT:
                raise _refusal(f"key {_written(key)} is not text; put it in quotes", key)
            if key.value in lines:
                raise _refusal(f"{_written(key)} is there twice, first on line {lines[key.value]}; keep one", key)
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; if Python refuses it (the 31st of February, for example), the error names its line."""
        try:
            value = super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            raise _refusal(f"{_written(node)}: {problem}", node) from None
        if isinstance(value, int) and value.bit_length() > LARGEST_INTEGER_BITS:
            raise _refusal(f"{_written(node)} is larger than any number here may be", node)
        if node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode) and _RIDDLE.fullmatch(node.value):
            raise _refusal(f"{_written(node)} would be read as {value}; write the number plainly, or a text in quotes", node)
        return value


Document.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z"), list("-+0123456789.")
)


def collect_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object's dictionary; raises ValueError for a repeated key."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:80]!r} is there twice; keep one")
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError when parsed JSON is nested deeper than YAML may be, or holds a number that is too large."""
    level = [value]
    for _ in range(LARGEST_DEPTH):
        if any(isinstance(each, int) and each.bit_length() > LARGEST_INTEGER_BITS for each in level):
            raise ValueError("a number is larger than any may be here")
        groups = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [inner for group in groups for inner in group]
        if not level:
            return
    raise ValueError(f"nested deeper than {LARGEST_DEPTH} levels")


def _written(node: yaml.Node) -> str:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
