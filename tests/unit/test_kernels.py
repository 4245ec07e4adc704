import ast
import importlib
import sys
from types import ModuleType

import pytest

from multimodal import kernels as module
from tests.sanity.repository import ROOT


@pytest.fixture
def reloaded(monkeypatch):
    """Reload `multimodal.kernels` with something else in the compiled module's place; puts it back."""

    def reload(compiled):
        monkeypatch.setitem(sys.modules, "multimodal._kernels", compiled)
        monkeypatch.delattr("multimodal._kernels", raising=False)
        return importlib.reload(module)

    yield reload
    monkeypatch.undo()
    importlib.reload(module)


def test_every_declared_kernel_is_asked_for():
    stub = ast.parse((ROOT / "multimodal" / "_kernels.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == set(module._NAMES)


def test_kernels_of_older_sources_are_not_used(reloaded):
    older = ModuleType("multimodal._kernels")
    for name in module._NAMES[1:]:
        setattr(older, name, None)
    found = reloaded(older)
    assert found.kernels is None
    assert f"built from older sources ({module._NAMES[0]} is missing); run 'pip install -e .'" in found.describe_kernels()


def test_missing_kernels_are_told(reloaded):
    found = reloaded(None)
    assert found.kernels is None
    assert found.describe_kernels().startswith("Python references, which are slow: the C++ kernels are ")


def test_built_kernels_are_told():
    if module.kernels is None:
        pytest.skip("the C++ kernels are not built")
    assert module.describe_kernels() == "C++ kernels"
