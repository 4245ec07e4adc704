"""The file form that all values share: YAML or JSON, told apart by the file's suffix."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from multimodal.values.errors import BraidError


def read_mapping(path: str | Path, *, error: type[BraidError]) -> dict[str, Any]:
    """Read a YAML or JSON file whose top level is a mapping.

    Raises `error` when the file is missing, cannot be parsed, or is not a mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise error(f"{path}: no such file; give the path of an existing .yaml or .json file")
    text = path.read_text()
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as problem:
        raise error(f"{path}: cannot be parsed ({' '.join(str(problem).split())}); correct the syntax there") from problem
    if not isinstance(value, dict):
        raise error(f"{path}: expected a mapping at the top level, found {type(value).__name__}")
    return value


def write_mapping(path: str | Path, value: dict[str, Any], *, has_short_lists: bool = False) -> None:
    """Write `value` as JSON when the suffix is .json, else as YAML; has_short_lists: innermost lists go on one line."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(value, indent=2) + "\n")
    else:
        style: dict[str, Any] = {"default_flow_style": None, "width": 130} if has_short_lists else {}
        path.write_text(yaml.safe_dump(value, sort_keys=False, **style))


def line_of(path: str | Path, place: Sequence[str | int]) -> int:
    """Return the line, counted from 1, on which something stands in a YAML or JSON file that can be parsed.

    place: keys and indices that lead to it; where the file lacks the last of them, the line of what should hold it.
    """
    node: yaml.Node | None = yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
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
