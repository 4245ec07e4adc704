"""Imports point one way: entry points -> megatron.runtime -> multimodal, and inside both from room to room, without a circle."""

import ast
import graphlib
from collections import defaultdict
from functools import cache

import pytest
import yaml

from tests.sanity.repository import ROOT, list_python_files, module_name
from tests.unit.golden_answers import Kinds, golden_test

ROOMS_BELOW, RUNTIME_ROOMS_BELOW = (
    {room: set(below) for room, below in rooms.items()}
    for rooms in yaml.safe_load((ROOT / "tests" / "golden" / "rooms.yaml").read_text()).values()
)
LARGEST_ROOM = 15
WITH_TORCH = ["multimodal", "balance", "exchange"]
"""The room that runs in loops of others, beside the balancers that it asks."""
PURE_ROOMS = {"references", "values", "hugging_face", "cost", "schedule", "balance", "plan"}
ROOMS_WITH_KERNELS = {"values", "schedule", "balance", "plan", "attention"}
ENTRY_POINTS = {"pretrain_mllm", "tools", "tests", "examples", "benchmarks"}

MODULES = list_python_files("multimodal", "megatron")


@cache
def list_imports(source):
    """List the dotted names that a module imports, wherever in it the imports stand."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            names += [f"{start}.{alias.name}" for alias in node.names]
    return names


def find_violations(module, source):
    """List the imports of a module that the layout forbids."""
    return [name for name in list_imports(source) if not _is_allowed(module.split("."), name.split("."))]


def _is_allowed(module, name):
    if name[0] in ENTRY_POINTS or name[0] == "":
        return False
    if module[0] != "multimodal":
        return name[:2] != ["megatron", "runtime"] or _is_allowed_in_runtime(module[2:], name[2:])
    room = module[1] if len(module) > 1 else None
    if name[0] == "multimodal":
        target = name[1]
        below = ROOMS_BELOW.get(room, set())
        return (
            target == room
            or target in below
            or (target in ("kernels", "references") and room in ROOMS_WITH_KERNELS)
            or (target == "_kernels" and room == "kernels")
        )
    if (room in PURE_ROOMS and module[:3] != WITH_TORCH) or room is None:
        return name[0] not in ("torch", "megatron")
    return name[:2] != ["megatron", "runtime"]


def _is_allowed_in_runtime(module, name):
    room = module[0] if module else None
    return bool(name) and (name[0] == room or name[0] in RUNTIME_ROOMS_BELOW.get(room, set()))


def find_circle(sources, *, knows_itself=False):
    """Return the modules of some circle of imports, wherever in a module they stand; sources: module -> source.

    knows_itself: True if what a name stands for may import what it stands for, too (a folder).
    """
    needs = {module: {_owner(name, sources) for name in list_imports(source)} - {None} for module, source in sources.items()}
    needs = {module: found - {module} for module, found in needs.items()} if knows_itself else needs
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as problem:
        return problem.args[1]
    return []


def _owner(name, modules):
    """Return the module that a dotted name is, or is defined in; None outside of them."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_imports_point_down():
    assert {path: found for path in MODULES if (found := find_violations(module_name(path), path.read_text()))} == {}


def test_a_run_needs_nothing_that_an_installed_package_lacks():
    assert [name for name in list_imports((ROOT / "pretrain_mllm.py").read_text()) if name.split(".")[0] in ENTRY_POINTS] == []


def test_no_modules_import_each_other_in_a_circle():
    assert find_circle({module_name(path): path.read_text() for path in MODULES}) == []


def test_no_folder_of_the_values_needs_what_needs_it():
    sources = defaultdict(str)
    for path in list_python_files("multimodal/values"):
        sources[".".join(module_name(path).split(".")[:3])] += path.read_text() + "\n"
    assert find_circle(sources, knows_itself=True) == []


@pytest.mark.parametrize(
    ("later", "is_circle"),
    [
        ("from megatron.runtime.launch.meeting import Meeting", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.runtime.launch import meeting", True),
        ("def f():\n    import megatron.runtime.launch.meeting", True),
        ("import megatron.runtime.launch.failure", True),
        ("from megatron.runtime.launch.rank_place import RankPlace", False),
    ],
)
def test_a_planted_circle_is_found(later, is_circle):
    sources = {
        "megatron.runtime.launch": "",
        "megatron.runtime.launch.meeting": "from megatron.runtime.launch.failure import Ending",
        "megatron.runtime.launch.failure": later,
        "megatron.runtime.launch.rank_place": "import os",
    }
    assert bool(find_circle(sources)) == is_circle


def list_rooms(folder):
    return {path.name for path in (ROOT / folder).iterdir() if path.is_dir() and list_python_files(f"{folder}/{path.name}")}


def test_every_room_has_its_rule():
    beside = {path.stem for path in (ROOT / "megatron" / "runtime").glob("*.py")} - {"__init__"}
    assert list_rooms("multimodal") <= set(ROOMS_BELOW)
    assert list_rooms("megatron/runtime") | beside == set(RUNTIME_ROOMS_BELOW)


@pytest.mark.parametrize("rooms", [ROOMS_BELOW, RUNTIME_ROOMS_BELOW])
def test_rooms_have_an_order(rooms):
    assert all(below <= set(rooms) for below in rooms.values())
    graphlib.TopologicalSorter(rooms).prepare()


def test_no_room_of_the_runtime_is_crowded():
    files = {room: list_python_files(f"megatron/runtime/{room}") for room in list_rooms("megatron/runtime")}
    assert {room: len(found) for room, found in files.items() if len(found) - 1 > LARGEST_ROOM} == {}


@pytest.mark.parametrize("room", ["attention", "balance", "cost", "data", "model", "plan", "values"])
def test_no_room_that_decides_is_crowded(room):
    folders = [ROOT / "multimodal" / room, *(path for path in (ROOT / "multimodal" / room).rglob("*") if path.is_dir())]
    sizes = {folder.name: len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > LARGEST_ROOM} == {}


def test_the_tests_of_the_runtime_are_in_the_same_rooms():
    assert list_rooms("tests/unit/runtime") <= list_rooms("megatron/runtime")


def judge(document):
    violations = find_violations(document["module"], document["line"])
    return f"forbidden: {' '.join(violations)}" if violations else "allowed"


IMPORTS: Kinds = {"import": ({"module": "multimodal.values.plan", "line": "import math"}, judge)}
test_planted_imports_are_found_and_proper_ones_pass = golden_test("imports.txt", IMPORTS)
