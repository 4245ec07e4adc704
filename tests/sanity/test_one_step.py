"""The step is one value: no product code takes, holds or passes its model graph, plan and assignment side by side."""

import ast

import pytest

from tests.sanity.repository import ROOT, found_in, list_python_files

TRIPLE = {"graph", "plan", "assignment"}
MADE_HERE = {"multimodal/balance/placement.py": "as_computed", "multimodal/values/validate.py": "validate_assignment"}
"""The two functions that look at an assignment before it has a shape."""


def find_triples(source: str) -> list[str]:
    """Name the functions and classes of a module that take or hold all three."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            names = {each.id for each in fields if isinstance(each, ast.Name)}
        else:
            continue
        if names >= TRIPLE:
            found.append(node.name)
    return found


def test_nobody_takes_the_step_apart():
    modules = [*list_python_files("multimodal", "megatron", "tools"), ROOT / "pretrain_mllm.py"]
    assert found_in(modules, find_triples, ("assignment",)) == {name: [made] for name, made in MADE_HERE.items()}


@pytest.mark.parametrize(
    "source",
    [
        "def build(graph, plan, assignment):\n    pass",
        "def build(schedule, *, graph, plan, assignment, lowered):\n    pass",
        "class Run:\n    graph: int\n    plan: int\n    assignment: int",
    ],
)
def test_planted_triples_are_found(source):
    assert len(find_triples(source)) == 1
