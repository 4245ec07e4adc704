"""What a kind of layer is, its own files say: none outside the folders `layers` names one, and stages know no roles."""

import ast

import pytest

from multimodal.cost.layers.registry import LAYER_KINDS
from tests.sanity.repository import ROOT, found_in, list_python_files

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
