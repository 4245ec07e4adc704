"""The file form that all values share: YAML or JSON, told apart by the file's suffix."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from multimodal.values.errors import BraidError
from multimodal.values.yaml_document import Document, check_depth, collect_pairs

T = TypeVar("T")
LARGEST_FILE_BYTES = 64 * 2**20


def read_file(path: str | Path, build: Callable[[dict[str, Any]], T], *, error: type[BraidError]) -> T:
    """Read a YAML or JSON file and build a value from it; an error of the file or of `build` names the file and the line."""
    value = read_mapping(path, error=error)
    try:
        return build(value)
    except BraidError as problem:
        raise at_line(path, problem) from None


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
            value = yaml.load(text, Loader=Document)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise error(_describe(path, text, problem)) from None
    if value is None:
        raise error(f"{path}: expected a mapping at the top level, found nothing; write its keys and values")
    if not isinstance(value, dict):
        raise error(f"{path}: expected a mapping at the top level, found {type(value).__name__}")
    return value


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
    node: yaml.Node | None = yaml.compose(text.replace("\t", " ") if path.suffix == ".json" else text, Loader=Document)
    return node


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
