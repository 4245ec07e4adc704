"""Facts about schedules, passes and balancers stand in their rows: hardly another file knows one of them by its name."""

import ast

from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from tests.sanity.repository import found_in, list_python_files

REGISTRIES = {
    f"multimodal/{folder}/__init__.py" for folder in ("balance", "plan/planners", "schedule/builders", "schedule/passes")
}
CHOOSING = {
    *(f"multimodal/plan/planners/{name}.py" for name in ("entrain", "optimus")),
    "multimodal/plan/planners/baselines.py",
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
