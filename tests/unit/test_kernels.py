import importlib
import sys
from types import ModuleType

import pytest

from multimodal import kernels as module


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


def test_the_stub_declares_what_is_built():
    if module.kernels is None:
        pytest.skip("the C++ kernels are not built")
    assert sorted(module._NAMES) == sorted(name for name in vars(module.kernels) if not name.startswith("_"))


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
