"""Values stay what they are: schedules know shapes alone, and nothing changes a frozen value behind its back."""

import ast

from tests.sanity.repository import found_in, list_python_files

OF_SAMPLES = ("multimodal.values.assignment", "multimodal.values.arrays.placed_atoms")


def list_setters(source):
    """List the lines that set attributes of a frozen value outside of its `__post_init__`."""
    tree = ast.parse(source)
    inits = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"]
    allowed = {id(node) for each in inits for node in ast.walk(each)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "__setattr__"
        and isinstance(node.value, ast.Name)
        and node.value.id == "object"
        and id(node) not in allowed
    ]


def list_readings_of_samples(source):
    """List the modules that tell of samples and are imported here."""
    found = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [name for name in found if name in OF_SAMPLES]


def test_frozen_values_are_set_when_they_are_made():
    assert found_in(list_python_files("multimodal", "megatron", "tools"), list_setters, ("__setattr__",)) == {}


def test_builders_and_passes_read_no_samples():
    modules = list_python_files("multimodal/schedule/builders", "multimodal/schedule/passes", "multimodal/values/work")
    assert modules and found_in(modules, list_readings_of_samples) == {}


def test_planted_violations_are_found():
    setter = "object.__setattr__(self, 'step', 1)"
    assert list_setters(f"def __post_init__(self):\n    {setter}") == []
    assert list_setters(f"def with_step(self):\n    {setter}") == [2]
    assert list_readings_of_samples("def f():\n    from multimodal.values.assignment import Atom") == [OF_SAMPLES[0]]
