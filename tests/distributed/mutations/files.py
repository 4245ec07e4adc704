"""The places of a nested document, such as a model file's, and copies of it with one of them changed."""

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.mutations.mutation import Given, Inputs, Mutation, short
from tests.distributed.small_run import MODEL

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


def document_mutations(area: str, document: Any) -> Iterator[Mutation]:
    """Replace every value of a nested document by others, leave it out, and add a key to every mapping."""
    for path, value in places(document):
        shown, name = ".".join(map(str, path)), str(next(part for part in reversed(path) if isinstance(part, str)))
        for leaf in LEAVES:
            if leaf != value or type(leaf) is not type(value):
                changed = replaced(document, path, leaf)
                yield Mutation(f"{area}: {shown} = {short(leaf)}", partial(Inputs.give, kind=area, document=changed), (name,))
        left = replaced(document, path)
        yield Mutation(f"{area}: without {shown}", partial(Inputs.give, kind=area, document=left))
        if isinstance(value, dict):
            added = replaced(document, (*path, "no_such_key"), 1)
            named = ("no_such_key",)
            yield Mutation(f"{area}: {shown} with another key", partial(Inputs.give, kind=area, document=added), named, True)


def text_mutations(
    area: str, find: Callable[[Inputs], Path], *, file: str = "", must_be_refused: bool = True
) -> Iterator[Mutation]:
    """Replace the text of a file, whatever it says; file: its name, if the area's name does not say which."""
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda text: b"",
        "truncated": lambda text: text[: len(text) // 2 - 7],
        "not UTF-8": lambda text: text + b"\xff\xfe",
        "nested too deeply": lambda text: b"[" * 100_000,
        "a list": lambda text: b"[1, 2]\n",
        "binary": lambda text: bytes(range(256)),
        "executes": lambda text: b"!!python/object/apply:os.abort []\n",
        "expands": lambda text: (
            b"a: &a [1, 1]\n"
            + b"".join(
                b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (98 + i, 98 + i, *([97 + i] * 8)) for i in range(20)
            )
        ),
    }
    yield from byte_mutations(f"{area}: {file}", find, changes, (file or area,), must_be_refused=must_be_refused)


def byte_mutations(
    area: str,
    find: Callable[[Inputs], Path],
    changes: Mapping[str, Callable[[bytes], bytes]],
    names: tuple[str, ...] = (),
    *,
    must_be_refused: bool = True,
    given: Given | None = None,
) -> Iterator[Mutation]:
    """Change the bytes of a file, in ways by their names; area: and which file, for the names of the mutations."""
    for name, change in changes.items():
        apply = partial(rewrite, find=find, change=change)
        yield Mutation(f"{area} {name}".replace("  ", " "), apply, names, must_be_refused, given)


def place_mutations(
    area: str, find: Callable[[Inputs], Path], *, file: str, given: Given | None = None, is_optional: bool = False
) -> Iterator[Mutation]:
    """Remove a file, or put something else in its place; is_optional: a run without it may train."""
    changes: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path),
        "removed": lambda path: None,
    }
    for name, change in changes.items():
        apply = partial(_put, find=find, change=change)
        yield Mutation(f"{area}: {file} is {name}", apply, (file,), not is_optional, given)


def _put(inputs: Inputs, *, find: Callable[[Inputs], Path], change: Callable[[Path], object]) -> None:
    path = find(inputs)
    path.unlink()
    change(path)


def rewrite(inputs: Inputs, *, find: Callable[[Inputs], Path], change: Callable[[bytes], bytes]) -> None:
    path = find(inputs)
    path.write_bytes(change(path.read_bytes()))


def change_something(inputs: Inputs, *, find: Callable[[Inputs], Path], leaf: Any) -> None:
    """Write a leaf in the place of a value of a JSON file that is drawn."""
    document = json.loads(find(inputs).read_text())
    found = [place for place, value in places(document) if value != leaf]
    find(inputs).write_text(json.dumps(replaced(document, inputs.random.choice(found), leaf)))


def graph_mutations() -> Iterator[Mutation]:
    """Change the edges between units, or repeat a key."""
    for name, edges in {
        "duplicate": [["vision", "llm"], ["vision", "llm"]],
        "backward": [["llm", "vision"]],
        "to itself": [["vision", "llm"], ["llm", "llm"]],
        "to nobody": [["vision", "no_such_unit"]],
        "three": [["vision", "llm", "llm"]],
        "none": [],
        "text": "vision llm",
    }.items():
        document = MODEL | {"edges": edges}
        yield Mutation(f"model: edges {name}", partial(Inputs.give, kind="model", document=document), ("vision",), True)
    repeated = yaml.safe_dump(MODEL, sort_keys=False)
    texts = {
        "key": repeated.replace("    num_layers: 2\n", "    num_layers: 2\n    num_layers: 3\n"),
        "unit": repeated + yaml.safe_dump({"x": {"llm": MODEL["units"]["llm"]}}).replace("x:\n", ""),
    }
    changes = {name: lambda _, text=text: text.encode() for name, text in texts.items()}
    yield from byte_mutations("model: repeated", lambda inputs: inputs.folder / "model.yaml", changes, ("model.yaml",))
