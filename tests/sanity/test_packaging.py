"""What gets installed, and that it leaves the installed megatron-core visible."""

import importlib.util
import tomllib

from setuptools import find_namespace_packages

from tests.sanity.repository import ROOT


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "megatron").iterdir() if path.name != "__pycache__"] == ["runtime"]
    assert importlib.util.find_spec("megatron").origin is None


def test_megatron_core_and_the_runtime_are_found_side_by_side():
    core, runtime = (importlib.util.find_spec(f"megatron.{name}") for name in ("core", "runtime"))
    assert core is not None, "install megatron-core"
    assert not core.origin.startswith(str(ROOT / "megatron"))
    assert next(iter(runtime.submodule_search_locations)).endswith("megatron/runtime")


def test_only_braids_packages_are_installed():
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = set(find_namespace_packages(ROOT, include=find["include"], exclude=find["exclude"]))
    assert {"multimodal", "multimodal.values", "multimodal.balance", "megatron.runtime"} <= packages
    assert all(f"{name}.".startswith(("multimodal.", "megatron.runtime.")) for name in packages)
