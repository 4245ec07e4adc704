"""The YAML of Braid's files: no repeated keys, only text keys, bounded nesting and aliases, `1e-5` read as a number."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

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
            self._count_alias(event)
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

    def _count_alias(self, event: Any) -> None:
        size = self._size_of_anchor.get(event.anchor)
        if size is None and event.anchor in self.anchors:
            raise _refusal(f"*{event.anchor} stands inside what it names", event)
        self._num_nodes += size or 0
        self._num_aliased_nodes += size or 0
        if self._num_aliased_nodes > LARGEST_ALIASED_NODES:
            raise _refusal(f"aliases repeat more than {LARGEST_ALIASED_NODES:,} values; write out what is meant", event)


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
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {LARGEST_DEPTH} levels")


def _written(node: yaml.Node) -> str:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
    return repr(text[:80]) + ("..." if len(text) > 80 else "")


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
