"""The places of a nested document, such as a model file's, and copies of it with one of them changed."""

import copy
import math
from collections.abc import Iterator
from typing import Any

LEAVES: tuple[Any, ...] = (
    *(None, True, "text", "12", "1e-5", "", -1, 0, 1, 3, 1.5, 10**12, 10**400, math.nan, math.inf, -math.inf, [], [1, 2], {}),
)
"""What a mutation writes in the place of a value."""


def places(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Walk over every value of a document: the keys that lead to it, and the value."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for key, value in pairs:
        yield (*path, key), value
        yield from places(value, (*path, key))


def replaced(document: Any, path: tuple[str | int, ...], *value: Any) -> Any:
    """A copy of a document with one value replaced, or left out where none is given."""
    changed = copy.deepcopy(document)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return changed
