"""Compares the calls of packages that change from release to release with the signatures of those that are installed.

    python benchmarks/check_calls.py             every call that Braid's programs make of PACKAGES, found by reading them
    python benchmarks/check_calls.py --require transformer_engine triton        these must be installed, as in a container

Calls are found under the names that imports give; what is called otherwise, on objects, is in `OTHER_CALLS`. Nothing is called
here, but modules are imported. Exit code 1: some call does not fit, or a package that is required is missing.
"""

import argparse
import ast
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("megatron/runtime", "multimodal", "tools")
PACKAGES = ("megatron.core", "transformer_engine", "triton", "flash_attn", "apex")


class Call(NamedTuple):
    """A call in Braid's programs."""

    path: str
    """Module and names: `megatron.core.transformer.spec_utils.build_module`."""
    num_positional: int
    keywords: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        given = [*("..." for _ in range(self.num_positional)), *(f"{name}=" for name in self.keywords)]
        return f"{self.path}({', '.join(given)}) in {self.where}"


_ENGINE = "transformer_engine.pytorch.module"
_COLLECTIVES = ("gather_along_first_dim", "reduce_scatter_along_first_dim", "allreduce")
OTHER_CALLS = (
    *(Call(f"{_ENGINE}.linear.{name}", 3, (), "multimodal/model/collectives.py") for name in _COLLECTIVES),
    *(Call(f"{_ENGINE}.layernorm_linear.{name}", 3, (), "multimodal/model/collectives.py") for name in _COLLECTIVES),
    Call(f"{_ENGINE}.base.gather_along_first_dim", 3, (), "multimodal/model/collectives.py"),
    Call(f"{_ENGINE}._common.WeightGradStore.pop", 1, (), "multimodal/model/weight_gradient_queue.py"),
    Call(f"{_ENGINE}._common.WeightGradStore.delay_wgrad_compute", 1, (), "multimodal/model/weight_gradient_queue.py"),
    Call("transformer_engine.pytorch.GroupedLinear", 3, ("delay_wgrad_compute",), "multimodal/model/grouped_linear.py"),
    Call("transformer_engine.pytorch.GroupedLinear.forward", 3, (), "multimodal/model/expert_mlp.py"),
)
"""Names that are replaced or looked up by text, and methods of objects, the object counted as an argument."""


def calls_in(file: Path, *, packages: Sequence[str] = PACKAGES) -> Iterator[Call]:
    """Yield the calls of these packages in a Python file; those with * or ** are left out."""
    text = file.read_text()
    if not any(package in text for package in packages):
        return
    tree = ast.parse(text)
    names = dict(_imported_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (path := _path_of(node.func, names)) is not None:
            is_open = any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords)
            if path.startswith(tuple(f"{package}." for package in packages)) and not is_open:
                where = f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name}:{node.lineno}"
                yield Call(path, len(node.args), tuple(each.arg for each in node.keywords if each.arg is not None), where)


def problem_of(call: Call) -> str | None:
    """Return what is wrong with a call, None if it fits or has no signature that Python knows."""
    try:
        found = _find(call.path)
    except (ImportError, AttributeError) as problem:
        return f"{call}: {problem}"
    except RuntimeError:  # it asks for a device
        return None
    try:
        inspect.signature(found).bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
    except ValueError:  # a built-in function
        return None
    except TypeError as problem:
        return f"{call}: {problem}; the signature is {inspect.signature(found)}"
    return None


def all_calls(folders: Iterable[str] = FOLDERS) -> list[Call]:
    """List all calls in Braid's programs."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [*(call for file in files for call in calls_in(file)), *OTHER_CALLS]


def package_of(call: Call) -> str:
    """Return the one of `PACKAGES` that a call is of."""
    return next(package for package in PACKAGES if call.path.startswith(f"{package}."))


def version_of(package: str) -> str | None:
    """Return the installed version, None if it is not installed."""
    try:
        importlib.import_module(package)
    except ImportError:
        return None
    name = {"megatron.core": "megatron-core", "flash_attn": "flash-attn"}.get(package, package)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                yield (each.asname, each.name) if each.asname else (first, first)


def _path_of(called: ast.expr, names: dict[str, str]) -> str | None:
    attributes: list[str] = []
    while isinstance(called, ast.Attribute):
        attributes.append(called.attr)
        called = called.value
    if not isinstance(called, ast.Name) or called.id not in names:
        return None
    return ".".join((names[called.id], *reversed(attributes)))


def _find(path: str) -> Any:
    """Return what a path of modules and attributes leads to."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for index, name in enumerate(rest):
        if inspect.ismodule(found) and not hasattr(found, name):
            importlib.import_module(".".join((first, *rest[: index + 1])))
        found = getattr(found, name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print packages, the number of calls, and those that do not fit; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require", nargs="+", default=[], choices=PACKAGES, metavar="PACKAGE", help="Must be installed.")
    required = parser.parse_args(arguments).require
    calls, is_wrong = all_calls(), False
    for package in PACKAGES:
        version, own = version_of(package), [call for call in calls if package_of(call) == package]
        problems = [] if version is None else [found for call in own if (found := problem_of(call)) is not None]
        is_wrong = is_wrong or bool(problems) or (version is None and package in required)
        print(f"{package}: {version or 'not installed'}, {len(own)} calls, {len(problems)} do not fit")
        print("".join(f"    {problem}\n" for problem in problems), end="")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
