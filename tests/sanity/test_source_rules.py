"""Rules of the sources: one step, frozen values, one event core, and registries and kinds of layers that nobody else names."""

import ast
import re

import pytest

from multimodal.balance import BALANCERS
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
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


RULES = {"fill_idle_lanes", "list_schedule", "simulate_events"}


def test_each_kind_of_run_has_one_rule_on_the_event_core():
    callers = {path: len(re.findall(r"\brun_events\(", path.read_text())) for path in (ROOT / "csrc").glob("*.cpp")}
    assert {path.stem: count for path, count in callers.items() if count} == dict.fromkeys(RULES, 1)
    subclasses = {path: path.read_text().count("(EventRun[") for path in (ROOT / "multimodal").rglob("*.py")}
    assert {path.stem: count for path, count in subclasses.items() if count} == dict.fromkeys(RULES, 1)


def test_what_happens_next_is_asked_of_the_clock_alone():
    """A loop of its own would need a clock: a time that advances to the next of a heap of times."""
    for name in RULES:
        assert not re.search(r"\bnow_? = ", (ROOT / "csrc" / f"{name}.cpp").read_text()), name
        assert not re.search(r"self\.now = ", (ROOT / "multimodal" / "references" / f"{name}.py").read_text()), name


REGISTRIES = {
    f"multimodal/{folder}/__init__.py" for folder in ("balance", "plan/planners", "schedule/builders", "schedule/passes")
}
CHOOSING = {
    "multimodal/plan/planners/optimus.py",
    "multimodal/plan/planners/planning_request.py",
    "multimodal/plan/planners/templates/template_plan.py",
    "tools/from_megatron.py",
}
"""Planners that plan for one schedule, pass or balancer, and what says Megatron's schedule."""
NAMES = {*BUILDERS, *PASSES, *BALANCERS} - {"1f1b", "none", "auto", "fill", "sorted", "disttrain", "entrain"}
"""But for defaults, and what is also the name of something else."""


def find_names(source):
    """List the names that stand in a source as strings."""
    return [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in NAMES]


def test_no_other_file_knows_a_name():
    found = found_in(list_python_files("multimodal", "megatron", "tools"), find_names, [f'"{name}"' for name in NAMES])
    assert {name: names for name, names in found.items() if name not in REGISTRIES | CHOOSING} == {}


def test_a_planted_list_is_found():
    assert find_names('SPLIT_SCHEDULES = ("zb-h1", "zb-v")') == ["zb-h1", "zb-v"]


DEFAULTS = ROOT / "multimodal" / "values" / "units" / "unit.py"
"""Says which layers a unit has whose description lists none."""
FILES = [
    path
    for path in list_python_files("multimodal", "megatron", "tools")
    if path != DEFAULTS and path.parent not in (ROOT / "multimodal" / "cost" / "layers", ROOT / "multimodal" / "model" / "layers")
]


def find_kinds(source):
    """List the kinds of layer that a source names as texts."""
    return [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and node.value in LAYER_KINDS]


def test_no_other_file_names_a_kind_of_layer():
    assert found_in(FILES, find_kinds, [f'"{kind}"' for kind in LAYER_KINDS]) == {}


def test_stages_know_no_roles():
    files = list_python_files("multimodal/model")
    assert [path for path in files if path in FILES and "Role" in path.read_text()] == []


@pytest.mark.parametrize("line", ['if kind == "transformer":', 'match kind:\n case "head": pass', 'seconds[unit, "projector"]'])
def test_a_planted_kind_is_found(line):
    assert len(find_kinds(line + (" pass" if line.endswith(":") else ""))) == 1
