"""Imports point one way: entry points -> megatron.runtime -> multimodal, and inside multimodal down to its values."""

import ast

import pytest

from tests.sanity.repository import ROOT, list_python_files, module_name

ROOMS_BELOW = {
    "values": set(),
    "cost": {"values"},
    "schedule": {"cost", "values"},
    "balance": {"schedule", "cost", "values"},
    "plan": {"balance", "schedule", "cost", "values"},
    "attention": {"balance", "values"},
    "model": {"attention", "balance", "values"},
    "data": {"balance", "values"},
}
PURE_ROOMS = {"values", "cost", "schedule", "balance", "plan"}
ROOMS_WITH_KERNELS = {"schedule", "balance", "plan", "attention"}
ENTRY_POINTS = {"pretrain_mllm", "tools", "tests", "examples", "benchmarks"}

MODULES = list_python_files("multimodal", "megatron")


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
        return True
    room = module[1] if len(module) > 1 else None
    if name[0] == "multimodal":
        target = name[1]
        below = ROOMS_BELOW.get(room, set())
        return (
            target == room
            or target in below
            or (target == "kernels" and room in ROOMS_WITH_KERNELS)
            or (target == "_kernels" and room == "kernels")
        )
    if room in PURE_ROOMS or room is None:
        return name[0] not in ("torch", "megatron")
    return name[:2] != ["megatron", "runtime"]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    assert find_violations(module_name(path), path.read_text()) == []


def test_every_room_has_its_rule():
    rooms = {
        path.name for path in (ROOT / "multimodal").iterdir() if path.is_dir() and list_python_files(f"multimodal/{path.name}")
    }
    assert rooms <= set(ROOMS_BELOW)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("multimodal.values.plan", "from multimodal.balance import BALANCERS"),
        ("multimodal.values.plan", "import torch"),
        ("multimodal.cost.flops", "from multimodal import plan"),
        ("multimodal.balance.in_order", "from torch import nn"),
        ("multimodal.balance.in_order", "from ..plan import planner"),
        ("multimodal.plan.search", "def f():\n    import megatron.core"),
        ("multimodal.values.plan", "from multimodal.kernels import kernels"),
        ("multimodal.balance.post_balance", "from multimodal import _kernels"),
        ("multimodal.data.packing", "from multimodal.model import vision"),
        ("multimodal.model.vision", "import megatron.runtime.communication.broker"),
        ("multimodal.model.vision", "from megatron import runtime"),
        ("megatron.runtime.communication.broker", "import pretrain_mllm"),
        ("megatron.runtime.communication.broker", "from tools.plan import main"),
    ],
)
def test_planted_imports_are_found(module, line):
    assert len(find_violations(module, line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("multimodal.plan.search", "from multimodal.balance import BALANCERS"),
        ("multimodal.balance.longest_first_partition", "from multimodal.kernels import kernels"),
        ("multimodal.model.vision", "import torch\nfrom megatron.core import tensor_parallel"),
        ("megatron.runtime.communication.broker", "from multimodal.values.plan import Plan"),
    ],
)
def test_proper_imports_pass(module, line):
    assert find_violations(module, line) == []
