"""Input and what is said to it, or what it is read as, as whole texts in a file of tests/golden, so that a case takes no code.

`== KIND` begins a section, the document of that kind is right. A case is what a document has otherwise, behind `$`: places and
their values, a `-` before what is missing. Its answer, that of the kind's reader in an empty working folder, is in the next line.
`python -m tests.unit.golden_answers tests.unit.test_wrong_files` writes the answers of that module's text anew.
"""

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from multimodal.values.errors import BraidError
from tests.sanity.repository import ROOT

Kinds = Mapping[str, tuple[Any, Callable[[Any], object]]]
"""Kind -> a document of it, and what reads one."""


def changed(document: Any, changes: Mapping[str, Any]) -> Any:
    document = json.loads(json.dumps(document))  # a copy in which nothing is shared
    for place, value in changes.items():
        *parts, last = (int(part) if part.isdigit() else part for part in place.removeprefix("-").split("."))
        owner = document
        for part in parts:
            owner = owner[part]
        if place.startswith("-"):
            del owner[last]
        else:
            owner[last] = value
    return document


def answer(read: Callable[[Any], object], document: Any) -> str:
    """Return what is said to a document that is refused, the text that it is read as, or "taken"."""
    try:
        found = read(document)
    except BraidError as problem:
        told = f"{type(problem).__name__}: {problem}".replace(f"{Path.cwd()}/", "")
        assert "\n" not in told, told
        return told
    return found.replace(f"{Path.cwd()}/", "") if isinstance(found, str) else "taken"


def answers(name: str, kinds: Kinds) -> Iterator[str]:
    """Yield the lines of a golden text, with the answers that are given now; each document itself must be taken."""
    kind = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for line in (ROOT / "tests" / "golden" / name).read_text().splitlines():
            if line.startswith("== "):
                kind = line[3:]
                kinds[kind][1](kinds[kind][0])
            if line.startswith("$"):
                document, read = kinds[kind]
                yield line
                yield answer(read, changed(document, yaml.safe_load(f"{{{line[1:]}}}")))
            elif line.startswith(("== ", "#")) or not line:
                yield line


def differing(name: str, kinds: Kinds) -> list[tuple[str, str]]:
    """List the lines that are answered otherwise than a golden text has it."""
    written = (ROOT / "tests" / "golden" / name).read_text().splitlines()
    return [pair for pair in zip(answers(name, kinds), written, strict=True) if pair[0] != pair[1]]


def golden_test(name: str, kinds: Kinds) -> Callable[[], None]:
    """Return the test that all cases of a golden text are answered as written."""

    def test() -> None:
        unlike = differing(name, kinds)
        assert not unlike, "\n".join(f"found {found}\nnot   {expected}" for found, expected in unlike)

    test.golden = (name, kinds)  # type: ignore[attr-defined]
    return test


def write(module: str) -> None:
    for name, kinds in (test.golden for test in [*vars(importlib.import_module(module)).values()] if hasattr(test, "golden")):
        lines = list(answers(name, kinds))
        (ROOT / "tests" / "golden" / name).write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {sum(line.startswith('$') for line in lines)} cases")


if __name__ == "__main__":
    write(sys.argv[1])
